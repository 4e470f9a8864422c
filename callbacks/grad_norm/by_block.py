"""L2 norms of weights or gradients block by block: one pass over them, one sum over ranks where they are shards."""

import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BLOCK = re.compile(r"^(.*?\d+)\.")


def get_block(name: str) -> str:
    """`model.blocks.3.mlp.weight` -> `blocks.3`; what is in no numbered block by its own module."""
    name = name.removeprefix("model.")
    numbered = _BLOCK.match(name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


@torch.no_grad()
def norms_by_block(module: nn.Module) -> dict[str, float | None]:
    """Of the weights; a collective where they are shards. None where one is not finite."""
    return sum_by_block(module.named_parameters())


@torch.no_grad()
def sum_by_block(named: Iterable[tuple[str, Tensor]]) -> dict[str, float | None]:
    """L2 norm of each block's tensors, over all ranks where they are shards.

    Args:
        named: Tensors, DTensors, or what ZeRO-3 leaves of a parameter, by the parameter's name.
    """
    squares: dict[str, Tensor] = {}
    for name, tensor in named:
        square = _sum_of_squares(tensor)
        block = get_block(name)
        squares[block] = squares[block] + square if block in squares else square
    return {
        block: float(value.sqrt()) if bool(value.isfinite()) else None
        for block, value in squares.items()
    }


def _sum_of_squares(tensor: Any) -> Tensor:
    """Of the whole, wherever its shards are."""
    if hasattr(tensor, "ds_tensor"):  # padded with zeros
        in_memory = tensor.ds_tensor.status.name == "AVAILABLE"  # else on a disk
        square: Tensor = tensor.ds_tensor.double().square().sum()
        square = square if in_memory else torch.full_like(square, torch.nan)
        if dist.get_world_size() > 1:
            square = square.cuda() if dist.get_backend() == "nccl" else square
            dist.all_reduce(square)
        return square
    square = tensor.double().square().sum()
    whole = getattr(square, "full_tensor", None)
    return square if whole is None else whole()
