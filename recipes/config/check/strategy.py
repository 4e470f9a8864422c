"""What the chosen strategy can do with this model, this Trainer and these ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.check.blocks import lacks_blocks
from recipes.config.check.deepspeed import (
    check_offload,
    check_toolchain,
)
from recipes.config.check.types import to_setting
from recipes.config.traits import get_traits, trains
from recipes.errors import ConfigError
from recipes.runtime.world import num_gpus


def check_strategy(config: Mapping[str, Any], world_size: int | None) -> Iterator[ConfigError]:
    """Every question of a strategy; what does not train runs on one device, whatever the strategy.

    Args:
        config: Whole and bound.
        world_size: Ranks of the run; None where they are a mistake of their own.
    """
    if not trains(config):
        return
    strategy, trainer = config["strategy"], config["trainer"]
    traits = get_traits(strategy)
    yield from check_offload(strategy)
    yield from _groups_of_ranks(strategy, world_size)
    yield from _blocks(config)
    clips_by = trainer.get("gradient_clip_algorithm")
    if clips_by == "value" and not traits.clips_by_value:
        yield ConfigError(
            f"trainer.gradient_clip_algorithm=value {get_traits(strategy).typed}",
            "DeepSpeed clips by the global norm alone",
            "trainer.gradient_clip_algorithm=norm",
        )
    devices = trainer["devices"]
    is_list = isinstance(devices, list) and not traits.accepts_device_list
    if is_list and sorted(devices) != list(range(len(devices))):
        yield _other_gpus(devices, strategy)
    if trainer.get("sync_batchnorm"):
        yield from _batch_norms(strategy, to_setting(trainer["sync_batchnorm"]))
    yield from check_toolchain(strategy, config["optimizer"])


def _other_gpus(devices: list[int], strategy: Mapping[str, Any]) -> ConfigError:
    """DeepSpeed takes the GPU whose number is that of the rank on its node."""
    ids = ",".join(str(device) for device in devices)
    return ConfigError(
        f"trainer.devices=[{ids}] {get_traits(strategy).typed}",
        "DeepSpeed counts the GPUs it sees from 0",
        f"CUDA_VISIBLE_DEVICES={ids} python train.py … trainer.devices={len(devices)}",
    )


def _batch_norms(strategy: Mapping[str, Any], typed: str) -> Iterator[ConfigError]:
    traits = get_traits(strategy)
    if traits.needs_process_group and not traits.syncs_batch_norm:
        yield ConfigError(
            f"trainer.sync_batchnorm={typed} {get_traits(strategy).typed}",
            "batch norms are shared among ranks under strategy=ddp alone",
            "strategy=ddp",
        )
    elif traits.syncs_batch_norm and num_gpus() == 0:
        yield ConfigError(
            f"trainer.sync_batchnorm={typed}",
            "torch shares batch norms among GPUs alone, and there is none",
            "trainer.sync_batchnorm=false",
        )


def _groups_of_ranks(strategy: Mapping[str, Any], world_size: int | None) -> Iterator[ConfigError]:
    """Hybrid sharding: every copy of the model has the same number of ranks."""
    shard_size = strategy.get("shard_size")
    if not shard_size or shard_size < 1 or world_size is None or world_size % shard_size == 0:
        return
    below = max(
        size for size in range(1, world_size + 1) if size <= shard_size and world_size % size == 0
    )
    ranks = "1 rank does" if world_size == 1 else f"{world_size} ranks do"
    yield ConfigError(
        f"strategy.shard_size={shard_size}",
        f"{ranks} not divide into groups of {shard_size}",
        f"strategy.shard_size={below}, or null for the ranks of one node",
    )


def _blocks(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Sharding goes block by block: a model without them would be gathered whole."""
    strategy, model = config["strategy"], config["model"]
    if get_traits(strategy).shards_weights and lacks_blocks(model["_target_"]):
        yield ConfigError(
            get_traits(strategy).typed,
            f"it shards by block, and {model['_target_']} assigns no self.blocks",
            "strategy=ddp",
        )
