"""The collectives of this project in addition to those of the engines, some of them with a gradient.

Those with a gradient take part in the forward and backward pass of ranks that share an activation. They are operators
of torch that its compiler traces, and wait at once: a compiled block loses the gradient of an input that is still on
its way (torch 2.13: `AsyncCollectiveTensor`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

_OPS: Any = torch.ops._c10d_functional
Reduction = Literal["sum", "max"]
T = TypeVar("T")


def sum_over_ranks(value: Tensor, device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of a tensor over ranks.

    Args:
        value: Of the same shape on every rank; stays unchanged.
        device: Device that the process group works on; with several ranks the sum lies there.
        group: The ranks; None: all.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return value
    total = value.to(device, copy=True)  # shape of `value`; all_reduce overwrites it
    dist.all_reduce(total, group=group)
    return total


@torch.no_grad()
def average_over_ranks(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace each tensor by its mean over the ranks of a group, in place; None: over all ranks."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        tensor.div_(dist.get_world_size(group))


def gather_objects(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what each rank of a group has, anything that can be pickled, in the order of ranks; None: of all."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [own]
    gathered = [own] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return gathered


def reduce_parts(value: Tensor, group: dist.ProcessGroup, *, reduction: Reduction = "sum") -> Tensor:
    """Return the sum, or the largest, of a tensor over the ranks of a group; without a gradient."""
    out: Tensor = _OPS.wait_tensor(_OPS.all_reduce(value.contiguous(), reduction, group.group_name))
    return out


def gather_parts(x: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Return the parts of all ranks, concatenated along a dimension in the order of the ranks; without a gradient."""
    size = group.size()
    gathered: Tensor = _OPS.wait_tensor(_OPS.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    # [N B, t, ...] -> [B, N t, ...]
    return gathered.view(size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def scatter_sum(x: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Return this rank's part, along a dimension, of the sum over the ranks of a group; without a gradient."""
    size = group.size()
    # [B, N t, ...] -> [N B, t, ...]
    parts = _split(x, size, dim=dim).flatten(0, 1)
    out: Tensor = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(parts.contiguous(), "sum", size, group.group_name))
    return out


def exchange_parts(x: Tensor, group: dist.ProcessGroup, *, split: int, concat: int) -> Tensor:
    """Give each rank of a group its part along one dimension, and join what all send along another; no gradient."""
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
    """Send each rank of a group some rows, and return what all have sent here in their order; without a gradient.

    Args:
        rows: [R, ...], those for the first rank first.
        group: The ranks.
        num_sent: Rows for each rank; they sum to R.
        num_received: Rows from each.
    """
    out: Tensor = _OPS.wait_tensor(
        _OPS.all_to_all_single(rows.contiguous(), list(num_received), list(num_sent), group.group_name)
    )
    return out


def _split(x: Tensor, size: int, *, dim: int) -> Tensor:
    """Return equal parts along a dimension as a new first one."""
    return x.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :]).movedim(dim, 0)


class GatherParts(torch.autograd.Function):
    """Every rank uses all parts: the gradient of a part is summed over ranks. `apply(x, group, dim, dtype)`.

    Parts are sent in a dtype, and are in that of x again afterwards; their gradients are sent as they are.
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


class ScatterSum(torch.autograd.Function):
    """Every rank keeps a part of the sum: the gradient of the addends is gathered. `apply(x, group, dim)`."""

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
    """Every rank uses the same tensor for another part of the result: its gradient is summed. `apply(x, group)`."""

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
    """Every rank uses the same sum in the same way: each addend has its gradient. `apply(x, group)`."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return reduce_parts(x, group)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class JoinColumns(torch.autograd.Function):
    """Every rank uses all columns in the same way: its own have their part of the gradient. `apply(x, group)`."""

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
    """Each rank gives up one dimension for another; backward the other way. `apply(x, group, split, concat)`."""

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
    """Rows go to other ranks, their gradients come back. `apply(rows, group, num_sent, num_received, dtype)`.

    What is sent is rounded to a dtype, as a product would round it; the gradients are not: on one device, too, those of
    several products are added before they are rounded.
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
