"""L2 norms of weights or gradients by block: one pass over them, one sum over ranks per block where sharded."""

import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BLOCK = re.compile(r"^(.*?\d+)\.")


def get_block(name: str) -> str:
    """Return the block of a parameter: `model.blocks.3.mlp.weight` -> `blocks.3`.

    A parameter outside numbered blocks belongs to its own module: `model.head.weight` -> `head`.
    """
    name = name.removeprefix("model.")
    numbered = _BLOCK.match(name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


@torch.no_grad()
def norms_by_block(module: nn.Module) -> dict[str, float | None]:
    """Return the L2 norm of each block's weights, see `sum_by_block`."""
    return sum_by_block(module.named_parameters())


@torch.no_grad()
def sum_by_block(named: Iterable[tuple[str, Tensor]]) -> dict[str, float | None]:
    """Return the L2 norm of each block's tensors; a collective where they are sharded.

    Args:
        named: Tensors, DTensors, or ZeRO-3's placeholders of parameters, by the parameter's name.

    Returns:
        Norms by block; None where one is not finite.
    """
    squares: dict[str, Tensor] = {}
    for name, tensor in named:
        square = _sum_of_squares(tensor)
        block = get_block(name)
        squares[block] = squares[block] + square if block in squares else square
    return {block: float(value.sqrt()) if bool(value.isfinite()) else None for block, value in squares.items()}


def _sum_of_squares(tensor: Any) -> Tensor:
    """Return the 0-dim sum of squares of the unsharded tensor, in float64."""
    if hasattr(tensor, "ds_tensor"):  # ZeRO-3: this rank's shard, padded with zeros
        in_memory = tensor.ds_tensor.status.name == "AVAILABLE"  # else offloaded to disk
        square: Tensor = tensor.ds_tensor.double().square().sum()
        square = square if in_memory else torch.full_like(square, torch.nan)
        if dist.get_world_size() > 1:
            square = square.cuda() if dist.get_backend() == "nccl" else square
            dist.all_reduce(square)
        return square
    square = tensor.double().square().sum()
    full_tensor = getattr(square, "full_tensor", None)  # a DTensor's partial sum
    return square if full_tensor is None else full_tensor()
