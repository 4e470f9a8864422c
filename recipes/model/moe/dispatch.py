"""Order tokens by expert and back. Nothing here computes; a token that K experts compute has K rows in between.

Gradients are gathered as values are, by the opposite permutation: no sum is in an order of the device's own.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Order(NamedTuple):
    """The rows of all tokens by expert. Row i * K + k is that of token i and its k-th choice.

    Attributes:
        by_expert: [N K] int64, the rows in the order of their experts, within an expert in that of tokens.
        by_token: [N K] int64, the opposite: where each row has gone.
    """

    by_expert: Tensor
    by_token: Tensor


def sort_by_expert(chosen: Tensor) -> Order:
    """Return the order of the rows.

    Args:
        chosen: [N, K] int64, the experts of each token.
    """
    by_expert = chosen.flatten().argsort(stable=True)
    by_token = torch.empty_like(by_expert)
    by_token[by_expert] = torch.arange(len(by_expert), device=by_expert.device)
    return Order(by_expert, by_token)


def gather_rows(x: Tensor, order: Order) -> Tensor:
    """Return the rows of the experts: [N, W] -> [N K, W]."""
    rows: Tensor = _GatherRows.apply(x, order.by_expert, order.by_token)  # type: ignore[no-untyped-call]
    return rows


def combine_rows(rows: Tensor, order: Order, weights: Tensor) -> Tensor:
    """Return the weighted sum of what the experts made of each token, [N, W].

    Args:
        rows: [N K, W], by expert.
        order: Of the rows.
        weights: [N, K] float32; the sum is in float32, and rounded once.
    """
    num_tokens, num_chosen = weights.shape
    by_token: Tensor = _Permute.apply(rows, order.by_token, order.by_expert)  # type: ignore[no-untyped-call]
    parts = by_token.view(num_tokens, num_chosen, -1) * weights.unsqueeze(-1)  # [N, K, W] float32
    return parts.sum(dim=1).to(rows.dtype)


class _GatherRows(torch.autograd.Function):
    """Every token's row once for each of its experts: the gradient of a token is the sum over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by_expert: Tensor, by_token: Tensor) -> Tensor:
        ctx.save_for_backward(by_token)
        ctx.num_tokens = len(x)
        return x[by_expert // (len(by_expert) // len(x))]

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (by_token,) = ctx.saved_tensors
        return grad[by_token].view(ctx.num_tokens, -1, grad.shape[1]).sum(dim=1), None, None


class _Permute(torch.autograd.Function):
    """Rows in another order: the gradient goes back by the opposite one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, opposite: Tensor) -> Tensor:
        ctx.save_for_backward(opposite)
        return rows[order]

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (opposite,) = ctx.saved_tensors
        return grad[opposite], None, None
