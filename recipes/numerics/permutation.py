"""Rows in another order. Nothing here adds in an order of the device's own: gradients take the opposite way."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Order(NamedTuple):
    """An order of rows and what undoes it.

    Attributes:
        forward: [R] int64, which row comes where.
        backward: [R] int64, where each row has gone.
    """

    forward: Tensor
    backward: Tensor


def sort_rows(keys: Tensor) -> Order:
    """Return the order of rows by their keys, [R] whole numbers; rows of one key stay as they are."""
    forward = keys.argsort(stable=True)
    backward = torch.empty_like(forward)
    backward[forward] = torch.arange(len(forward), device=forward.device)
    return Order(forward, backward)


def permute_rows(rows: Tensor, order: Tensor, opposite: Tensor) -> Tensor:
    """Return rows in another order, [R, W].

    Args:
        rows: [R / K, W]; with K > 1, K copies of the first come before those of the second, and so on. The gradient of
            a row is the sum over its copies.
        order: [R] int64, which copy comes where.
        opposite: [R] int64, what undoes it.
    """
    permuted: Tensor = _Permute.apply(rows, order, opposite)  # type: ignore[no-untyped-call]
    return permuted


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, opposite: Tensor) -> Tensor:
        ctx.save_for_backward(opposite)
        ctx.num_copies = len(order) // len(rows) if len(rows) else 1
        return rows[order if ctx.num_copies == 1 else order // ctx.num_copies]

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (opposite,) = ctx.saved_tensors
        grad = grad[opposite]
        if ctx.num_copies > 1:
            grad = grad.view(-1, ctx.num_copies, grad.shape[1]).sum(dim=1)
        return grad, None, None
