"""Small collectives over the ranks of a run; without a process group, each returns the caller's own value.

Every rank must call them, in the same order. Those that return host values synchronize with the device once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def num_ranks() -> int:
    """Return the number of ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def data_rank(trainer: Any) -> int:
    """Return this rank's data-parallel rank; a strategy whose ranks share samples declares `data_rank`."""
    return int(getattr(trainer.strategy, "data_rank", trainer.global_rank))


def data_size(trainer: Any) -> int:
    """Return the number of data-parallel ranks; ranks that share samples count once."""
    return int(getattr(trainer.strategy, "data_size", trainer.world_size))


def max_over_ranks(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """Return each value's maximum over all ranks: one all-reduce.

    Args:
        values: Values by name, with the same names in the same order on every rank.
        device: This rank's device, on which the backend reduces.
    """
    if num_ranks() == 1:
        return dict(values)
    packed = torch.tensor(list(values.values()), device=device)  # [number of values], float32
    dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    return dict(zip(values, packed.tolist(), strict=True))


def all_ranks(flag: bool, device: torch.device) -> bool:
    """Return whether the flag is true on every rank: one all-reduce."""
    if num_ranks() == 1:
        return flag
    lowest = torch.tensor(float(flag), device=device)  # [], float32
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return bool(lowest)


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean of a 0-dim tensor over all ranks in float32, without synchronizing with the device."""
    if num_ranks() == 1:
        return value
    mean = value.clone().float()  # [], leaves the caller's tensor unchanged
    dist.all_reduce(mean)
    return torch.div(mean, dist.get_world_size())


def gather_values(values: Sequence[float], device: torch.device) -> list[list[float]]:
    """Return the values of every rank, by rank: one all-gather.

    Args:
        values: Values, the same number on every rank.
        device: This rank's device, on which the backend gathers.
    """
    if num_ranks() == 1:
        return [list(values)]
    packed = torch.tensor(values, device=device)  # [number of values], float32
    gathered = packed.new_empty(dist.get_world_size() * len(values))  # [ranks * number of values]
    dist.all_gather_into_tensor(gathered, packed)
    by_rank: list[list[float]] = gathered.view(-1, len(values)).tolist()
    return by_rank


def gather_objects(value: T) -> list[T]:
    """Return every rank's picklable value, by rank."""
    if num_ranks() == 1:
        return [value]
    gathered: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def gather_by_samples(value: T, trainer: Any) -> list[T]:
    """Return one picklable value per data-parallel rank, from the first of the ranks that share samples."""
    by_samples: dict[int, T] = {}
    for number, found in gather_objects((data_rank(trainer), value)):
        by_samples.setdefault(number, found)
    return [by_samples[number] for number in sorted(by_samples)]
