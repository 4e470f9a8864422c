"""L2 norms of weights or gradients by block: one pass over the tensors, plus one all-reduce if they are sharded."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ranks import gather_objects

_BLOCK = re.compile(r"^(.*?\d+)\.")


def get_block(name: str) -> str:
    """Return the block of a parameter: `model.blocks.3.mlp.weight` -> `blocks.3`.

    For a parameter outside numbered blocks it is the module's name: `model.head.weight` -> `head`.
    """
    name = name.removeprefix("model.")
    numbered = _BLOCK.match(name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


@torch.no_grad()
def norms_by_block(module: nn.Module) -> dict[str, float | None]:
    """Return the L2 norm of each block's weights; see `sum_by_block`."""
    return sum_by_block(module.named_parameters())


@torch.no_grad()
def sum_by_block(named: Iterable[tuple[str, Tensor]]) -> dict[str, float | None]:
    """Return the L2 norm of each block's tensors; a collective if they are sharded.

    Args:
        named: Pairs of parameter name and tensor, DTensor or ZeRO-3 parameter placeholder.

    Returns:
        Norm by block; None if it is not finite.
    """
    squares = sum_squares_by(named, get_block)
    return {block: float(value.sqrt()) if bool(value.isfinite()) else None for block, value in squares.items()}


def sum_squares(named: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Return the sum of squares over all elements of one or more named tensors, 0-dim float64."""
    return sum_squares_by(named, lambda name: "")[""]


def sum_squares_by(named: Iterable[tuple[str, Tensor]], get_group: Callable[[str], str]) -> dict[str, Tensor]:
    """Return the sum of squares of each group, 0-dim float64; `get_group` maps a parameter name to its group."""
    whole: dict[str, Tensor] = {}
    addends: dict[str, Tensor] = {}  # this rank's contributions
    for name, tensor in named:
        square, is_addend = _sum_of_squares(tensor)
        sums, group = addends if is_addend else whole, get_group(name)
        sums[group] = sums[group] + square if group in sums else square
    totals = _sum_over_ranks(addends)
    for group, square in whole.items():
        totals[group] = totals[group] + square.to(totals[group].device) if group in totals else square
    return {group: totals[group] for group in dict.fromkeys([*whole, *totals])}


def _sum_of_squares(tensor: Any) -> tuple[Tensor, bool]:
    """Return the 0-dim float64 sum of squares, and whether it must be summed over ranks."""
    if hasattr(tensor, "ds_tensor"):  # ZeRO-3: this rank's shard, padded with zeros
        in_memory = tensor.ds_tensor.status.name == "AVAILABLE"  # else offloaded to disk
        square: Tensor = tensor.ds_tensor.double().square().sum()
        return square if in_memory else torch.full_like(square, torch.nan), True
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor.double().square().sum(), False
    # a DTensor with any placements: each element is counted by the first rank that holds it
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    is_first = not any(coordinate and placement.is_replicate() for coordinate, placement in places)
    return to_local().double().square().sum() * is_first, True


def _sum_over_ranks(addends: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum over all ranks, whose names may differ, with one all-reduce; skip it if no rank has a name."""
    if not addends or dist.get_world_size() == 1:
        return addends
    # pipeline-parallel ranks hold different blocks
    names = list(dict.fromkeys(name for of_rank in gather_objects(list(addends)) for name in of_rank))
    zero = torch.zeros_like(next(iter(addends.values())))
    stacked = torch.stack([addends.get(name, zero) for name in names])  # [blocks]
    stacked = stacked.cuda() if dist.get_backend() == "nccl" else stacked
    dist.all_reduce(stacked)
    return dict(zip(names, stacked, strict=True))
