"""What the chosen strategy can do with this model, this Trainer and these ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.check.blocks import lacks_blocks
from recipes.config.check.deepspeed import check_offload, check_toolchain, engine_of, option_of
from recipes.config.check.types import written
from recipes.errors import Mistake
from recipes.runtime.world import num_gpus

# Lightning 2.6 converts batch norms under DDP and FSDP1 alone; one device has nothing to share them with
_SHARE_BATCH_NORMS = ("SingleDevice", "DataParallel")


def check_engines(config: Mapping[str, Any], world_size: int | None) -> Iterator[Mistake]:
    """Every question of a strategy; what does not train runs on one device, whatever the strategy.

    Args:
        config: Whole and bound.
        world_size: Ranks of the run; None where they are a mistake of their own.
    """
    if not config["mode"]["_target_"].endswith(".fit"):
        return
    strategy, trainer = config["strategy"], config["trainer"]
    yield from check_offload(strategy)
    yield from _groups_of_ranks(strategy, world_size)
    yield from _blocks(config)
    clips_by = trainer.get("gradient_clip_algorithm")
    if engine_of(strategy) == "Zero" and clips_by == "value":
        yield Mistake(
            f"trainer.gradient_clip_algorithm=value {option_of(strategy)}",
            "DeepSpeed clips by the global norm alone",
            "trainer.gradient_clip_algorithm=norm",
        )
    devices = trainer["devices"]
    is_list = engine_of(strategy) == "Zero" and isinstance(devices, list)
    if is_list and sorted(devices) != list(range(len(devices))):
        yield _other_gpus(devices, strategy)
    if trainer.get("sync_batchnorm"):
        yield from _batch_norms(strategy, written(trainer["sync_batchnorm"]))
    yield from check_toolchain(strategy, config["optimizer"])


def _other_gpus(devices: list[int], strategy: Mapping[str, Any]) -> Mistake:
    """DeepSpeed takes the GPU whose number is that of the rank on its node."""
    ids = ",".join(str(device) for device in devices)
    return Mistake(
        f"trainer.devices=[{ids}] {option_of(strategy)}",
        "DeepSpeed counts the GPUs it sees from 0",
        f"CUDA_VISIBLE_DEVICES={ids} python train.py … trainer.devices={len(devices)}",
    )


def _batch_norms(strategy: Mapping[str, Any], typed: str) -> Iterator[Mistake]:
    if engine_of(strategy) not in _SHARE_BATCH_NORMS:
        yield Mistake(
            f"trainer.sync_batchnorm={typed} {option_of(strategy)}",
            "batch norms are shared among ranks under strategy=ddp alone",
            "strategy=ddp",
        )
    elif engine_of(strategy) == "DataParallel" and num_gpus() == 0:
        yield Mistake(
            f"trainer.sync_batchnorm={typed}",
            "torch shares batch norms among GPUs alone, and there is none",
            "trainer.sync_batchnorm=false",
        )


def _groups_of_ranks(strategy: Mapping[str, Any], world_size: int | None) -> Iterator[Mistake]:
    """Hybrid sharding: every copy of the model has the same number of ranks."""
    shard_size = strategy["shard_size"] if engine_of(strategy) == "HybridShard" else None
    if not shard_size or shard_size < 1 or world_size is None or world_size % shard_size == 0:
        return
    below = max(
        size for size in range(1, world_size + 1) if size <= shard_size and world_size % size == 0
    )
    ranks = "1 rank does" if world_size == 1 else f"{world_size} ranks do"
    yield Mistake(
        f"strategy.shard_size={shard_size}",
        f"{ranks} not divide into groups of {shard_size}",
        f"strategy.shard_size={below}, or null for the ranks of one node",
    )


def _blocks(config: Mapping[str, Any]) -> Iterator[Mistake]:
    """Sharding goes block by block: a model without them would be gathered whole."""
    strategy, model = config["strategy"], config["model"]
    engine = engine_of(strategy)
    shards = engine in ("FullyShard", "HybridShard") or (
        engine == "Zero" and strategy["stage"] == 3
    )
    if shards and lacks_blocks(model["_target_"]):
        yield Mistake(
            option_of(strategy),
            f"it shards by block, and {model['_target_']} assigns no self.blocks",
            "strategy=ddp",
        )
