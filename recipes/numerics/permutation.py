"""Deterministic row permutation: the backward pass applies the inverse permutation instead of an atomic scatter."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Order(NamedTuple):
    """A permutation of rows and its inverse.

    Attributes:
        forward: [R] int64, source row at each position.
        backward: [R] int64, position of each source row.
    """

    forward: Tensor
    backward: Tensor


def sort_rows(keys: Tensor) -> Order:
    """Return the permutation that stably sorts rows by integer keys [R]."""
    forward = keys.argsort(stable=True)
    backward = torch.empty_like(forward)
    backward[forward] = torch.arange(len(forward), device=forward.device)
    return Order(forward, backward)


def permute_rows(rows: Tensor, order: Tensor, opposite: Tensor) -> Tensor:
    """Return permuted rows, [R, W].

    Args:
        rows: [R / K, W]; with K > 1, each row is first repeated K times in place. The gradient of a row is the sum
            over its copies.
        order: [R] int64, source copy at each position.
        opposite: [R] int64, inverse of `order`.
    """
    permuted: Tensor = _Permute.apply(rows, order, opposite)
    return permuted


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, opposite: Tensor) -> Tensor:
        ctx.save_for_backward(opposite)
        ctx.num_copies = len(order) // len(rows) if len(rows) else 1
        return rows[order if ctx.num_copies == 1 else order // ctx.num_copies]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (opposite,) = ctx.saved_tensors
        grad = grad[opposite]
        if ctx.num_copies > 1:
            grad = grad.view(-1, ctx.num_copies, grad.shape[1]).sum(dim=1)
        return grad, None, None
