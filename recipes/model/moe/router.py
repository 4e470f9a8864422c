"""The router of a layer: which experts compute a token, with which weights, and how evenly tokens are spread."""

from collections.abc import Callable
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.numerics.linear import linear

Scores = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """The decisions of one layer.

    Attributes:
        chosen: [B, T, K] int64, the experts of each token.
        weights: [B, T, K] float32, of their outputs.
        counts: [E] int64, tokens of each expert.
        terms: [3, B] float32, load-balance loss, router z-loss and entropy of each sequence; the first two have a
            gradient.
    """

    chosen: Tensor
    weights: Tensor
    counts: Tensor
    terms: Tensor


class Router(nn.Module):
    """Scores experts by a linear layer without bias, in float32 under every precision, and chooses the K best.

    A bias per expert, added to the scores for the choice alone, balances the load without a loss that competes with
    the objective (DeepSeek-V3, arXiv 2408.15664). No gradient reaches it: `balance_experts` sets it.

    Args:
        hidden_size: W.
        num_experts: E.
        num_chosen: K.
        scores: `softmax` over experts (Mixtral), or `sigmoid` of each (DeepSeek-V3).
        renormalize: Weights of a token sum to 1.
        scale: Factor of the weights.
        num_groups: Number of groups of consecutive experts.
        num_chosen_groups: Number of groups whose experts a token may use: those whose two best score highest together.
    """

    bias: Tensor  # [E] float32, saved in checkpoints

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        num_chosen: int,
        scores: Scores,
        renormalize: bool,
        scale: float,
        num_groups: int,
        num_chosen_groups: int,
    ) -> None:
        super().__init__()
        self.num_chosen = num_chosen
        self.scores = scores
        self.renormalize = renormalize
        self.scale = scale
        self.num_groups = num_groups
        self.num_chosen_groups = num_chosen_groups
        # no `nn.Linear`, whose weight an engine may gather in a low precision
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert; the bias keeps its float32 values, which bfloat16 would not tell apart near 1."""
        bias = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.bias.dtype != torch.float32:
            self.bias = bias.to(self.bias.device)
        return self

    @override
    def forward(self, x: Tensor) -> Routing:
        """[B, T, W] -> the decisions"""
        kind = "cpu" if x.device.type == "meta" else x.device.type  # autocast knows no meta device
        with torch.autocast(kind, enabled=False):
            logits = linear(x.float(), self.weight.float())  # [B, T, E] float32
        scores = logits.softmax(dim=-1) if self.scores == "softmax" else logits.sigmoid()  # [B, T, E]
        eligible = scores.detach() + self.bias  # [B, T, E]
        if self.num_chosen_groups < self.num_groups:
            eligible = hide_groups(eligible, num_groups=self.num_groups, num_chosen=self.num_chosen_groups)
        chosen = eligible.topk(self.num_chosen, dim=-1).indices  # [B, T, K]
        weights = scores.gather(-1, chosen)  # [B, T, K]
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.scale != 1.0:
            weights = weights * self.scale
        shares = scores if self.scores == "softmax" else scores / scores.sum(dim=-1, keepdim=True)  # [B, T, E]
        # a token chooses an expert once: no two writes meet, in any order
        is_chosen = torch.zeros_like(shares, dtype=torch.bool).scatter_(-1, chosen, True)  # [B, T, E]
        counts = is_chosen.sum(dim=1)  # [B, E]
        terms = torch.stack([*get_losses(logits, shares, counts, num_chosen=self.num_chosen), get_entropy(shares)])
        return Routing(chosen, weights, counts.sum(dim=0), terms)

    @override
    def extra_repr(self) -> str:
        return f"num_experts={len(self.bias)}, num_chosen={self.num_chosen}, scores={self.scores}"


def hide_groups(scores: Tensor, *, num_groups: int, num_chosen: int) -> Tensor:
    """Return scores with -inf in the groups whose two best experts score least (arXiv 2412.19437, section 2.1.2).

    A token then goes to the nodes of a few groups, whatever the number of its experts.

    Args:
        scores: [B, T, E], of consecutive groups of experts.
        num_groups: Of two experts or more.
        num_chosen: Groups that keep their scores.
    """
    of_groups = scores.view(*scores.shape[:-1], num_groups, -1)  # [B, T, groups, experts]
    best = of_groups.topk(2, dim=-1).values.sum(dim=-1).topk(num_chosen, dim=-1).indices  # [B, T, chosen]
    is_kept = torch.zeros(of_groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, True)
    hidden = of_groups.masked_fill(~is_kept.unsqueeze(-1), -torch.inf)
    return hidden.view(scores.shape)


def get_losses(logits: Tensor, shares: Tensor, counts: Tensor, *, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Return the load-balance loss and the router z-loss of each sequence, both [B] float32.

    The first is E * sum_e f_e P_e (Switch, arXiv 2101.03961), with the share f_e of choices that expert e gets, and
    its mean share P_e of the scores: 1 if either is even, E if all tokens prefer the same one. f and P are those of
    the sequence (arXiv 2412.19437, equation 17). Over a batch their product would depend on how it is split. The
    second is the mean over tokens of the squared log of the normalizer (ST-MoE, arXiv 2202.08906).

    Args:
        logits: [B, T, E].
        shares: [B, T, E], scores that sum to 1.
        counts: [B, E], tokens of each expert; no gradient.
        num_chosen: K.
    """
    num_tokens, num_experts = logits.shape[1:]
    frequencies = counts / (num_tokens * num_chosen)  # [B, E]
    balance = num_experts * (frequencies * shares.mean(dim=1)).sum(dim=-1)  # [B]
    return balance, logits.logsumexp(dim=-1).square().mean(dim=1)


def get_entropy(shares: Tensor) -> Tensor:
    """Return the mean entropy of a token's scores in nats, [B]: ln E where a router has no preference."""
    entropies: Tensor = torch.special.entr(shares.detach()).sum(dim=-1)  # [B, T]
    return entropies.mean(dim=1)


def find_bias_steps(counts: Tensor) -> Tensor:
    """Return -1 for experts with more tokens than the mean of their layer, 1 for those with fewer, float32.

    Args:
        counts: [L, E] of whole numbers.
    """
    return (counts.sum(dim=-1, keepdim=True) - counts.shape[-1] * counts).sign().float()


def describe_loads(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest load of an expert over the mean of its layer, of all layers; both 0-dim.

    Args:
        counts: [L, E].
    """
    loads = counts / counts.double().mean(dim=-1, keepdim=True)  # [L, E]
    return loads.max(), loads.min()
