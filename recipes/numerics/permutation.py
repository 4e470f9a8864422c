"""Rows in another order. Gradients are gathered, as values are, by the opposite order: nothing is added."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def find_opposite(order: Tensor) -> Tensor:
    """Return the order that undoes another one.

    Args:
        order: [R] int64, which row comes where.
    """
    opposite = torch.empty_like(order)  # [R]
    opposite[order] = torch.arange(len(order), device=order.device)
    return opposite


def permute_rows(rows: Tensor, order: Tensor, opposite: Tensor) -> Tensor:
    """Return rows in another order.

    Args:
        rows: [R, W].
        order: [R] int64, which row comes where.
        opposite: [R] int64, what undoes it.
    """
    permuted: Tensor = _Permute.apply(rows, order, opposite)  # type: ignore[no-untyped-call]
    return permuted


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, opposite: Tensor) -> Tensor:
        ctx.save_for_backward(opposite)
        return rows[order]

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (opposite,) = ctx.saved_tensors
        return grad[opposite], None, None
