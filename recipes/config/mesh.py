"""Read the sizes of the device mesh from a composed config; imports no torch."""

import math
from collections.abc import Mapping
from typing import Any

from recipes.config.traits import get_traits, takes_steps
from recipes.errors import ConfigError
from recipes.mesh import Mesh
from recipes.runtime.world import Ranks

# ranks that work on the same samples
MODEL_SIZES = ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")
# supported by FSDP2 only
_BY_FSDP = {
    "tensor_parallel_size": "tensor parallelism",
    "pipeline_parallel_size": "pipeline parallelism",
    "expert_parallel_size": "expert parallelism",
}


def get_mesh(config: Mapping[str, Any], ranks: Ranks) -> Mesh:
    """Return the mesh of a run; a mode without training steps has one rank.

    Args:
        config: Composed config.
        ranks: Ranks of the run.

    Raises:
        ConfigError: The sizes do not divide the ranks, or the strategy has no such dimension.
    """
    if not takes_steps(config):
        return Mesh()
    return make_mesh(config, ranks)


def count_data_ranks(config: Mapping[str, Any], world_size: int) -> int:
    """Return the number of data-parallel ranks, even if the sizes do not divide the ranks."""
    model_size: int = math.prod(config[name] or 1 for name in MODEL_SIZES)  # 0 is reported by the check
    return max(1, world_size // model_size)


def make_mesh(config: Mapping[str, Any], ranks: Ranks) -> Mesh:
    """Return the mesh of a config on the given ranks. Raises the same errors as `get_mesh`."""
    sizes = {name: config[name] for name in MODEL_SIZES}
    traits = get_traits(config["strategy"])
    for name, what in _BY_FSDP.items():
        size = config[name]
        if size > 1 and traits.state_layout != "fsdp":
            raise ConfigError(
                f"{name}={size} {traits.typed}",
                f"{what} needs strategy=fsdp or hsdp",
                f"strategy=fsdp, which shards over the other ranks, or {name}=1",
            )
    model_size = math.prod(sizes.values())
    data_size, rest = divmod(ranks.world_size, model_size)
    if rest or not data_size:
        raise ConfigError(
            " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1),
            f"{_count(ranks.world_size)} not divisible by {model_size}",
            _suggest_sizes(ranks.world_size, sizes),
        )
    tensor, context, pipeline = (sizes[name] for name in MODEL_SIZES)
    replicate, shard = _divide_data(config, data_size, per_node=max(1, ranks.per_node // (tensor * context)))
    return Mesh(
        expert=_divide_experts(config, shard * context),
        pipeline=pipeline,
        pipeline_schedule=config["pipeline_schedule"],
        replicate=replicate,
        shard=shard,
        context=context,
        tensor=tensor,
        sequence_parallel=config["sequence_parallel"],
    )


def _divide_experts(config: Mapping[str, Any], num_ranks: int) -> int:
    """Return the expert-parallel size within the ranks that share a copy of the model."""
    size: int = config["expert_parallel_size"]
    if num_ranks % size:
        raise ConfigError(
            f"expert_parallel_size={size}",
            f"{_count(num_ranks)} not divisible by {size}",
            f"expert_parallel_size={largest_divisor(num_ranks, most=size)}, or another trainer.devices",
        )
    return size


def _divide_data(config: Mapping[str, Any], data_size: int, *, per_node: int) -> tuple[int, int]:
    """Split `data_size` ranks into model replicas and shards; return both numbers."""
    traits = get_traits(config["strategy"])
    replicate, shard = (config[f"data_parallel_{name}"] for name in ("replicate", "shard"))
    typed = [f"data_parallel_{n}={s}" for n, s in (("replicate", replicate), ("shard", shard)) if s is not None]
    if traits.state_layout != "fsdp":
        if (replicate or 1) * (shard or 1) > 1:
            raise ConfigError(
                f"{' '.join(typed)} {traits.typed}",
                "only strategy=fsdp and hsdp set the number of replicas and of ranks per replica",
                f"strategy=fsdp, or {' '.join(text.partition('=')[0] + '=null' for text in typed)}",
            )
        return (data_size, 1) if traits.replicates_state else (1, data_size)
    if replicate is None and shard is None:
        shard = min(per_node, data_size) if traits.shards_within_node else data_size
    has_copies_alone = replicate is not None and shard is None
    shard = max(1, int(shard or data_size // (replicate or 1)))
    replicate = int(replicate or data_size // shard)
    if replicate * shard != data_size and has_copies_alone:
        raise ConfigError(
            typed[0],
            f"{_count(data_size)} not divisible by {replicate}",
            f"data_parallel_replicate={largest_divisor(data_size, most=replicate)}",
        )
    if replicate * shard != data_size:
        raise ConfigError(
            " ".join(typed) or f"strategy={traits.option}",
            f"{_count(data_size)} not divisible by {shard}"
            if len(typed) < 2
            else f"their product is {replicate * shard}, and {data_size} ranks read samples of their own",
            f"data_parallel_shard={largest_divisor(data_size, most=shard)} data_parallel_replicate=null",
        )
    return replicate, shard


def _suggest_sizes(world_size: int, sizes: Mapping[str, int]) -> str:
    """Return sizes that divide the ranks: the requested ones or the next smaller."""
    left, fits = world_size, []
    for name, size in sizes.items():
        if size > 1:
            fits.append(f"{name}={largest_divisor(left, most=size)}")
            left //= largest_divisor(left, most=size)
    return f"{' '.join(fits)}, or another trainer.devices"


def largest_divisor(number: int, *, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`."""
    return next(size for size in range(min(most, number), 0, -1) if number % size == 0)


def _count(number: int) -> str:
    return "1 rank is" if number == 1 else f"{number} ranks are"
