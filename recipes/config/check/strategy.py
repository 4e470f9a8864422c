"""Check that the chosen strategy supports these Trainer arguments, devices and ranks, optimizer and adapter."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.check.deepspeed import check_offload, check_toolchain
from recipes.config.check.types import to_setting
from recipes.config.signature import read_signature
from recipes.config.traits import get_traits, plans_steps, takes_steps
from recipes.errors import ConfigError
from recipes.runtime.world import num_gpus


def check_strategy(config: Mapping[str, Any], world_size: int | None) -> Iterator[ConfigError]:
    """Check the strategy of a run that takes steps; every other mode runs on one device regardless.

    Args:
        config: Composed config whose nodes match their signatures.
        world_size: Number of ranks; None if it is invalid, which is reported separately.
    """
    if not takes_steps(config):
        return
    strategy, trainer = config["strategy"], config["trainer"]
    traits = get_traits(strategy)
    yield from check_offload(strategy)
    clips_by = trainer.get("gradient_clip_algorithm")
    if clips_by == "value" and not traits.clips_by_value:
        yield ConfigError(
            f"trainer.gradient_clip_algorithm=value {traits.typed}",
            "DeepSpeed clips by the global norm only",
            "trainer.gradient_clip_algorithm=norm",
        )
    devices = trainer["devices"]
    is_list = isinstance(devices, list) and not traits.accepts_device_list
    if is_list and sorted(devices) != list(range(len(devices))):
        ids = ",".join(str(device) for device in devices)
        yield ConfigError(
            f"trainer.devices=[{ids}] {traits.typed}",
            "DeepSpeed counts the GPUs it sees from 0",  # it uses the one whose index is the local rank
            f"CUDA_VISIBLE_DEVICES={ids} python train.py … trainer.devices={len(devices)}",
        )
    if trainer.get("sync_batchnorm"):
        yield from _check_sync_batchnorm(strategy, to_setting(trainer["sync_batchnorm"]))
    yield from check_toolchain(strategy, config["optimizer"], accelerator=trainer.get("accelerator"))


def _check_sync_batchnorm(strategy: Mapping[str, Any], typed: str) -> Iterator[ConfigError]:
    traits = get_traits(strategy)
    if traits.needs_process_group and not traits.syncs_batch_norm:
        yield ConfigError(
            f"trainer.sync_batchnorm={typed} {traits.typed}",
            "batch norm statistics are synchronized under strategy=ddp only",
            "strategy=ddp",
        )
    elif traits.syncs_batch_norm and num_gpus() == 0:
        yield ConfigError(
            f"trainer.sync_batchnorm={typed}",
            "torch synchronizes batch norm statistics between GPUs only, and there is none",
            "trainer.sync_batchnorm=false",
        )


def check_optimizer(config: Mapping[str, Any], choices: Mapping[str, str]) -> Iterator[ConfigError]:
    """Check that the optimizer supports the strategy's parameters, under ZeRO flat shards, and the run's average.

    Args:
        config: Composed config whose nodes match their signatures.
        choices: Option chosen for each group, to name it in messages.
    """
    if not (takes_steps(config) or plans_steps(config)):
        return
    strategy, target = config["strategy"], str(config["optimizer"]["_target_"])
    traits = get_traits(strategy)
    constants = read_signature(target).constants
    option = choices["optimizer"] if "optimizer" in choices else target.split(".")[-2]  # the module has its name
    if constants.get("keeps_average") and config["ema_decay"] is not None:
        yield ConfigError(
            f"ema_decay={config['ema_decay']} optimizer={option}",
            "this optimizer averages the weights itself, and mode.weights=ema reads one average",
            "ema_decay=null, or optimizer=adamw",
        )
    if traits.state_layout != "zero" or constants.get("accepts_flat_partitions", True):
        return
    one_by_one = "it updates parameters individually, but DeepSpeed passes one flat shard of all parameters"
    offloads = strategy["offload_optimizer"] is not None
    yield ConfigError(
        f"optimizer={option} {traits.typed}",
        str(constants.get("why_no_partitions", one_by_one)),
        "strategy=fsdp strategy.cpu_offload=true" if offloads else "strategy=fsdp, or strategy=ddp",
    )


def check_adapter(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check that strategy and precision support an adapter and its frozen base weights."""
    adapter = config.get("adapter", {})
    if adapter.get("use_dora") and config["strategy"].get("stage") == 3:
        yield ConfigError(
            "adapter.use_dora=true strategy=deepspeed_stage_3",
            "DoRA needs the norms of the full frozen weights, and each rank has only a part of them",
            "strategy=fsdp, or adapter=lora",
        )
    if adapter.get("quantization") is not None:
        yield from _quantized_base(config, quantization=adapter["quantization"])


def _quantized_base(config: Mapping[str, Any], *, quantization: str) -> Iterator[ConfigError]:
    """Check that everything that reads the frozen base weights supports 4-bit weights."""
    stage = config["strategy"].get("stage")
    if stage is not None:
        yield ConfigError(
            f"adapter.quantization={quantization} strategy={get_traits(config['strategy']).option}",
            "DeepSpeed broadcasts and partitions all weights as plain tensors, which weights in 4 bits are not",
            "strategy=fsdp, or adapter=lora",
        )
    if config["adapter"].get("use_dora"):
        yield ConfigError(
            f"adapter.quantization={quantization} adapter.use_dora=true",
            "DoRA computes row norms of the frozen weights in every step, which 4-bit storage does not provide",
            "adapter=qlora, or adapter=dora",
        )
    if config["precision"]["name"] == "fp8-mixed":
        yield ConfigError(
            f"adapter.quantization={quantization} precision=fp8-mixed",
            "float8 products cast weights of 16 or 32 bits, and these have 4",
            "precision=bf16-mixed, or adapter=lora",
        )
