"""Check that the chosen strategy supports these Trainer arguments, devices and ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.check.deepspeed import check_offload, check_toolchain
from recipes.config.check.types import to_setting
from recipes.config.signature import read_signature
from recipes.config.traits import get_traits, plans_steps, takes_steps
from recipes.errors import ConfigError
from recipes.runtime.world import num_gpus


def check_strategy(config: Mapping[str, Any], world_size: int | None) -> Iterator[ConfigError]:
    """Check the strategy of a run that takes steps; every other mode runs on one device, whatever the strategy.

    Args:
        config: Composed config whose nodes match their signatures.
        world_size: Ranks of the run; None if they are a mistake of their own.
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
        yield _reject_device_list(devices, strategy)
    if trainer.get("sync_batchnorm"):
        yield from _check_sync_batchnorm(strategy, to_setting(trainer["sync_batchnorm"]))
    yield from check_toolchain(strategy, config["optimizer"], accelerator=trainer.get("accelerator"))


def _reject_device_list(devices: list[int], strategy: Mapping[str, Any]) -> ConfigError:
    """DeepSpeed uses the GPU whose index is the local rank."""
    ids = ",".join(str(device) for device in devices)
    return ConfigError(
        f"trainer.devices=[{ids}] {get_traits(strategy).typed}",
        "DeepSpeed counts the GPUs it sees from 0",
        f"CUDA_VISIBLE_DEVICES={ids} python train.py … trainer.devices={len(devices)}",
    )


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
    """Check that the optimizer can step what the strategy gives it: under ZeRO, flat parts of all parameters.

    Args:
        config: Composed config whose nodes match their signatures.
        choices: Option chosen for each group, to name it in messages.
    """
    if not (takes_steps(config) or plans_steps(config)):
        return
    strategy, target = config["strategy"], str(config["optimizer"]["_target_"])
    traits = get_traits(strategy)
    constants = read_signature(target).constants
    if traits.state_layout != "zero" or constants.get("accepts_flat_partitions", True):
        return
    one_by_one = "it steps parameters one by one, and DeepSpeed gives an optimizer one flat part of all parameters"
    option = choices["optimizer"] if "optimizer" in choices else target.split(".")[-2]  # the module has its name
    offloads = strategy["offload_optimizer"] is not None
    yield ConfigError(
        f"optimizer={option} {traits.typed}",
        str(constants.get("why_no_partitions", one_by_one)),
        "strategy=fsdp strategy.cpu_offload=true" if offloads else "strategy=fsdp, or strategy=ddp",
    )
