"""Mixture-of-experts layer that replaces the MLP of a block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from recipes.model.moe.router import Router
from recipes.numerics.grouped_linear import GroupedLinear
from recipes.numerics.permutation import Order, permute_rows, sort_rows
from recipes.parallel.experts import ExpertRanks


class Experts(nn.Module):
    """E SwiGLU MLPs with stacked weights: `gate` and `up` [E, F, W], `out` [E, W, F].

    Attributes:
        expert_ranks: Expert-parallel ranks; None: this rank has all experts.
    """

    expert_ranks: ExpertRanks | None = None

    def __init__(self, num_experts: int, *, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate = GroupedLinear(num_experts, hidden_size, ffn_hidden_size)
        self.up = GroupedLinear(num_experts, hidden_size, ffn_hidden_size)
        self.out = GroupedLinear(num_experts, ffn_hidden_size, hidden_size)

    @override
    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert to its rows.

        Args:
            rows: [R, W], sorted by expert.
            counts: [E] int64, rows per expert.
        """
        if self.expert_ranks is not None:
            of_all: Tensor = self.expert_ranks.compute(rows, counts, self._compute)
            return of_all
        return self._compute(rows, counts)

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts of this rank."""
        ends = counts.cumsum(dim=0).to(torch.int32)  # [E]
        out: Tensor = self.out(F.silu(self.gate(rows, ends)) * self.up(rows, ends), ends)
        return out


class MoeMlp(nn.Module):
    """Routes tokens to experts and sums the weighted outputs, plus the output of shared experts."""

    def __init__(self, *, router: Router, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared

    @override
    def forward(self, x: Tensor, is_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return [B, T, W], and loads [E] and terms [3, B] of `Routing`; arguments as for `Router.forward`."""
        routing = self.router(x, is_token)
        order = sort_rows(routing.chosen.flatten())  # [N K], sorted by expert, then by token
        rows = permute_rows(x.flatten(0, 1), order.forward, order.backward)  # [N K, W], by expert
        rows = self.experts(rows, routing.counts)
        out = combine_rows(rows, order, routing.weights.flatten(0, 1))  # [N, W]
        out = out.view(x.shape)
        if self.shared is not None:
            out = out + self.shared(x)
        return out, routing.loads, routing.terms


def combine_rows(rows: Tensor, order: Order, weights: Tensor) -> Tensor:
    """Return the weighted sum of the expert outputs of each token, [N, W].

    Args:
        rows: [N K, W], sorted by expert.
        order: Permutation that sorted the rows.
        weights: [N, K] float32; the sum is computed in float32 and rounded once.
    """
    by_token = permute_rows(rows, order.backward, order.forward).view(*weights.shape, -1)  # [N, K, W]
    return (by_token * weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)
