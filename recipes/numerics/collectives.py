"""Collectives used in addition to those of the engines, some of them differentiable.

The differentiable ones are used in the forward pass of ranks that share an activation. They are torch operators that
torch.compile can trace, and wait immediately: a compiled block loses the gradient of an input that is still in flight
(torch 2.13: `AsyncCollectiveTensor`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from recipes.torch_internals import COLLECTIVES as _OPS

Reduction = Literal["sum", "max"]
T = TypeVar("T")


def sum_over_ranks(value: Tensor, device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of a tensor over ranks.

    Args:
        value: Tensor of the same shape on every rank; not modified.
        device: Device of the process group; with several ranks, also of the result.
        group: Process group; None: all ranks.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return value
    total = value.to(device, copy=True)  # shape of `value`; all_reduce overwrites it
    dist.all_reduce(total, group=group)
    return total


@torch.no_grad()
def average_over_ranks(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Average each tensor over the ranks of a group in place; None: all ranks."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        tensor.div_(dist.get_world_size(group))


def gather_objects(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather a picklable object from each rank of a group, in rank order; None: all ranks."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [own]
    gathered = [own] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return gathered


def reduce_parts(value: Tensor, group: dist.ProcessGroup, *, reduction: Reduction = "sum") -> Tensor:
    """Return the sum or maximum of a tensor over the ranks of a group; not differentiable."""
    out: Tensor = _OPS.wait_tensor(_OPS.all_reduce(value.contiguous(), reduction, group.group_name))
    return out


def gather_parts(x: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """All-gather shards and concatenate them along a dimension in rank order; not differentiable."""
    size = group.size()
    gathered: Tensor = _OPS.wait_tensor(_OPS.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    # [N B, t, ...] -> [B, N t, ...]
    return gathered.view(size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def scatter_sum(x: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Reduce-scatter: return this rank's shard, along a dimension, of the sum over a group; not differentiable."""
    size = group.size()
    # [B, N t, ...] -> [N B, t, ...]
    parts = _split(x, size, dim=dim).flatten(0, 1)
    out: Tensor = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(parts.contiguous(), "sum", size, group.group_name))
    return out


def exchange_parts(x: Tensor, group: dist.ProcessGroup, *, split: int, concat: int) -> Tensor:
    """All-to-all: split along one dimension and concatenate along another; not differentiable."""
    size = group.size()
    parts = _split(x, size, dim=split)  # [N, ...]
    shape = parts.shape
    counts = [parts[0].numel()] * size
    received: Tensor = _OPS.wait_tensor(
        _OPS.all_to_all_single(parts.contiguous().flatten(), counts, counts, group.group_name)
    )
    return received.view(shape).movedim(0, concat).flatten(concat, concat + 1)


def exchange_rows(
    rows: Tensor, group: dist.ProcessGroup, *, num_sent: Sequence[int], num_received: Sequence[int]
) -> Tensor:
    """All-to-all of rows with sizes per rank; received rows are in rank order; not differentiable.

    Args:
        rows: [R, ...], sorted by destination rank.
        group: Process group.
        num_sent: Number of rows for each rank, summing to R.
        num_received: Number of rows from each rank.
    """
    out: Tensor = _OPS.wait_tensor(
        _OPS.all_to_all_single(rows.contiguous(), list(num_received), list(num_sent), group.group_name)
    )
    return out


def _split(x: Tensor, size: int, *, dim: int) -> Tensor:
    """Split a dimension into equal parts, stacked along a new first dimension."""
    return x.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :]).movedim(dim, 0)


class GatherParts(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward. `apply(x, group, dim, dtype)`.

    Shards are sent in `dtype` and converted back to that of x; gradients are sent unconverted.
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return gather_parts(x.to(dtype), group, dim=dim).to(x.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return scatter_sum(grad, ctx.group, dim=ctx.dim), None, None, None


def gather_rows(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """All-gather equal numbers of rows, [B, ...] -> [N B, ...] in rank order; differentiable.

    The gradient of this rank's rows is the sum over ranks of the gradients that each has for them.

    Args:
        x: Tensor of the same shape on every rank.
        group: Process group; None: all ranks.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return x
    gathered: Tensor = GatherParts.apply(x, group or dist.group.WORLD, 0, x.dtype)
    return gathered


class ScatterSum(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward. `apply(x, group, dim)`."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return scatter_sum(x, group, dim=dim)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_parts(grad, ctx.group, dim=ctx.dim), None, None


class CopyToRanks(torch.autograd.Function):
    """Identity forward, all-reduce backward. `apply(x, group)`."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_parts(grad, ctx.group), None


class ReduceFromRanks(torch.autograd.Function):
    """All-reduce forward, identity backward. `apply(x, group)`."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return reduce_parts(x, group)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class JoinColumns(torch.autograd.Function):
    """All-gather of columns forward; backward keeps this rank's columns of the gradient. `apply(x, group)`."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        return gather_parts(x, group, dim=x.ndim - 1)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.group.rank() * ctx.width, ctx.width), None


class ExchangeParts(torch.autograd.Function):
    """All-to-all between two dimensions forward, the reverse backward. `apply(x, group, split, concat)`."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, split: int, concat: int) -> Tensor:
        ctx.group, ctx.split, ctx.concat = group, split, concat
        return exchange_parts(x, group, split=split, concat=concat)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange_parts(grad, ctx.group, split=ctx.concat, concat=ctx.split), None, None, None


class ExchangeRows(torch.autograd.Function):
    """All-to-all of rows; gradients are sent back. `apply(rows, group, num_sent, num_received, dtype)`.

    Rows are sent in `dtype`, to which the following matmul would round them anyway. Gradients are not rounded: on one
    device too, those of several matmuls are summed before rounding.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        rows: Tensor,
        group: dist.ProcessGroup,
        num_sent: list[int],
        num_received: list[int],
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.group, ctx.num_sent, ctx.num_received = group, num_sent, num_received
        return exchange_rows(rows.to(dtype), group, num_sent=num_sent, num_received=num_received).to(rows.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = exchange_rows(grad, ctx.group, num_sent=ctx.num_received, num_received=ctx.num_sent)
        return back, None, None, None, None
