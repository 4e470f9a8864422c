"""The two sums over ranks that the house needs beside the engines' own: one all-reduce each."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(value: Tensor, device: torch.device) -> Tensor:
    """Add a tensor over all ranks, on the device their backend works on; the sum stays there."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    summed = value.to(device, copy=True)
    dist.all_reduce(summed)
    return summed


@torch.no_grad()
def average_over_ranks(tensors: Iterable[Tensor]) -> None:
    """Give every rank the mean of each tensor, in place."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())
