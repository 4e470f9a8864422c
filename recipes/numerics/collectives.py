"""The two sums over ranks that this project needs in addition to those of the engines: one all-reduce each."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(value: Tensor, device: torch.device) -> Tensor:
    """Return the sum of a tensor over all ranks.

    Args:
        value: Of the same shape on every rank; stays unchanged.
        device: Device that the process group works on; with several ranks the sum lies there.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    total = value.to(device, copy=True)  # shape of `value`; all_reduce overwrites it
    dist.all_reduce(total)
    return total


@torch.no_grad()
def average_over_ranks(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its mean over all ranks, in place."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())
