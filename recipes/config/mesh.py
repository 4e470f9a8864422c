"""Read the sizes of the device mesh from a composed config; imports no torch."""

import math
from collections.abc import Mapping
from typing import Any

from recipes.config.traits import get_traits, takes_steps
from recipes.errors import ConfigError
from recipes.mesh import Mesh
from recipes.runtime.world import Ranks

MODEL_SIZES = ("tensor_parallel_size", "context_parallel_size")  # of ranks that work on the same samples


def get_mesh(config: Mapping[str, Any], ranks: Ranks) -> Mesh:
    """Return the mesh of a run; of one rank for a mode that takes no steps.

    Args:
        config: Composed.
        ranks: Of the run.

    Raises:
        ConfigError: The sizes do not divide the ranks, or the strategy has no such dimension.
    """
    if not takes_steps(config):
        return Mesh()
    return make_mesh(config, ranks)


def count_data_ranks(config: Mapping[str, Any], world_size: int) -> int:
    """Return how many of a run's ranks have different samples, whether the sizes divide them or not."""
    return max(1, world_size // math.prod(config.get(name) or 1 for name in MODEL_SIZES))


def make_mesh(config: Mapping[str, Any], ranks: Ranks) -> Mesh:
    """Return the mesh of a config's run on some ranks. Errors: as `get_mesh`."""
    # an older run's config has none of these settings, and its ranks divided samples alone
    tensor, context = (config.get(name) or 1 for name in MODEL_SIZES)
    traits = get_traits(config["strategy"])
    if tensor > 1 and traits.state_layout != "fsdp":
        raise ConfigError(
            f"tensor_parallel_size={tensor} {traits.typed}",
            "matrices are divided under strategy=fsdp and hsdp only",
            "strategy=fsdp, which shards over the other ranks, or tensor_parallel_size=1",
        )
    data_size, rest = divmod(ranks.world_size, tensor * context)
    if rest or not data_size:
        raise ConfigError(
            " ".join(f"{name}={size}" for name, size in zip(MODEL_SIZES, (tensor, context), strict=True) if size > 1),
            f"{_count(ranks.world_size)} not divide into groups of {tensor * context}",
            _suggest_sizes(ranks.world_size, tensor=tensor, context=context),
        )
    replicate, shard = _divide_data(config, data_size, per_node=max(1, ranks.per_node // (tensor * context)))
    return Mesh(
        replicate=replicate,
        shard=shard,
        context=context,
        tensor=tensor,
        sequence_parallel=config.get("sequence_parallel", True),
    )


def _divide_data(config: Mapping[str, Any], data_size: int, *, per_node: int) -> tuple[int, int]:
    """Return copies of the model, and ranks that share one, which have `data_size` samples together."""
    traits = get_traits(config["strategy"])
    replicate, shard = (config.get(f"data_parallel_{name}") for name in ("replicate", "shard"))
    typed = [f"data_parallel_{n}={s}" for n, s in (("replicate", replicate), ("shard", shard)) if s is not None]
    if traits.state_layout != "fsdp":
        if (replicate or 1) * (shard or 1) > 1:
            raise ConfigError(
                f"{' '.join(typed)} {traits.typed}",
                "only strategy=fsdp and hsdp have a number of copies and of ranks that share one",
                f"strategy=fsdp, or {' '.join(text.partition('=')[0] + '=null' for text in typed)}",
            )
        return (data_size, 1) if traits.replicates_state else (1, data_size)
    if replicate is None and shard is None:
        shard = min(per_node, data_size) if traits.shards_within_node else data_size
    shard = int(shard or data_size // (replicate or 1))
    replicate = int(replicate or data_size // shard)
    if replicate * shard != data_size:
        others = _count(data_size) if data_size > 1 else "1 rank does"
        raise ConfigError(
            " ".join(typed) or f"strategy={traits.option}",
            f"{others} not divide into groups of {shard}" if len(typed) < 2 else f"{data_size} ranks have samples",
            f"data_parallel_shard={_nearest_below(shard, data_size)} data_parallel_replicate=null",
        )
    return replicate, shard


def _suggest_sizes(world_size: int, *, tensor: int, context: int) -> str:
    """Return sizes that divide the ranks: the wanted ones or the next smaller."""
    tensor = _nearest_below(tensor, world_size)
    context = _nearest_below(context, world_size // tensor)
    return f"tensor_parallel_size={tensor} context_parallel_size={context}, or another trainer.devices"


def _nearest_below(wanted: int, number: int) -> int:
    """Return the largest divisor of a number that is not above another."""
    return next(size for size in range(min(wanted, number), 0, -1) if number % size == 0)


def _count(number: int) -> str:
    return "1 rank does" if number == 1 else f"{number} ranks do"
