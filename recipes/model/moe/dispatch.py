"""Order tokens by expert and back. Nothing here computes; a token that K experts compute has K rows in between.

Gradients are gathered as values are, by the opposite permutation: no sum is in an order of the device's own.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recipes.numerics.permutation import find_opposite, permute_rows


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
    return Order(by_expert, find_opposite(by_expert))


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
    by_token = permute_rows(rows, order.by_token, order.by_expert)
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
