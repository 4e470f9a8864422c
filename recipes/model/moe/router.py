"""Router of a mixture-of-experts layer: expert choice, weights, auxiliary losses and load statistics."""

from collections.abc import Callable
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.numerics.linear import linear

Scores = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """Routing decisions of one layer.

    Attributes:
        chosen: [B, T, K] int64, experts of each token.
        weights: [B, T, K] float32, weights of the expert outputs.
        counts: [E] int64, rows per expert, those of padding included: the sizes of the experts' matrix products.
        loads: [E] int64, tokens per expert.
        terms: [3, B] float32, load-balance loss, router z-loss and entropy of each sequence; the first two have a
            gradient.
    """

    chosen: Tensor
    weights: Tensor
    counts: Tensor
    loads: Tensor
    terms: Tensor


class Router(nn.Module):
    """Scores experts with a linear layer without bias, in float32 under every precision, and chooses the top K.

    A bias per expert, used only to choose experts, balances the load without a loss that competes with the objective
    (DeepSeek-V3, arXiv 2408.15664). It has no gradient: `balance_experts` sets it.

    Args:
        hidden_size: W.
        num_experts: E.
        num_chosen: K.
        scores: `softmax` over experts (Mixtral), or `sigmoid` of each (DeepSeek-V3).
        renormalize: Whether the weights of a token sum to 1.
        scale: Factor of the weights.
        num_groups: Number of groups of consecutive experts.
        num_chosen_groups: Number of groups that a token may use, ranked by the sum of their two best scores.
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
        # not `nn.Linear`, whose weight an engine may gather in low precision
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the parameters; the bias stays float32: bfloat16 is too coarse near 1."""
        bias = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype != torch.float32:
            self.bias = bias.to(self.bias.device)
        return self

    @override
    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Routing:
        """Route tokens [B, T, W]; padding, where `is_token` [B, T] is False, is routed, but in no load and no term."""
        kind = "cpu" if x.device.type == "meta" else x.device.type  # autocast does not support meta
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
        counts = loads = is_chosen.sum(dim=1)  # [B, E]
        if is_token is not None:
            loads = (is_chosen & is_token[..., None]).sum(dim=1)  # [B, E]
        losses = get_losses(logits, shares, loads, num_chosen=self.num_chosen, is_token=is_token)
        terms = torch.stack([*losses, get_entropy(shares, is_token=is_token)])
        return Routing(chosen, weights, counts.sum(dim=0), loads.sum(dim=0), terms)

    @override
    def extra_repr(self) -> str:
        return f"num_experts={len(self.bias)}, num_chosen={self.num_chosen}, scores={self.scores}"


def hide_groups(scores: Tensor, *, num_groups: int, num_chosen: int) -> Tensor:
    """Mask all but the groups with the highest sums of their top two scores (arXiv 2412.19437, section 2.1.2).

    This limits the number of nodes that a token is sent to, regardless of the number of its experts.

    Args:
        scores: [B, T, E], experts of a group are consecutive.
        num_groups: Number of groups, each of at least two experts.
        num_chosen: Number of groups that keep their scores; the others are set to -inf.
    """
    of_groups = scores.view(*scores.shape[:-1], num_groups, -1)  # [B, T, groups, experts]
    best = of_groups.topk(2, dim=-1).values.sum(dim=-1).topk(num_chosen, dim=-1).indices  # [B, T, chosen]
    is_kept = torch.zeros(of_groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, True)
    hidden = of_groups.masked_fill(~is_kept.unsqueeze(-1), -torch.inf)
    return hidden.view(scores.shape)


def get_losses(
    logits: Tensor, shares: Tensor, loads: Tensor, *, num_chosen: int, is_token: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the load-balance loss and the router z-loss of each sequence, both [B] float32.

    The first is E * sum_e f_e P_e (Switch, arXiv 2101.03961), where f_e is the fraction of choices of expert e and P_e
    its mean normalized score: 1 if either is uniform, E if all tokens prefer the same expert. f and P are computed per
    sequence (arXiv 2412.19437, equation 17); over a batch, their product would depend on how the batch is split. The
    second is the mean over tokens of the squared log-sum-exp of the logits (ST-MoE, arXiv 2202.08906).

    Args:
        logits: [B, T, E].
        shares: [B, T, E], scores normalized to sum to 1.
        loads: [B, E], tokens per expert; no gradient.
        num_chosen: K.
        is_token: [B, T] bool, False for padding; None: no padding.
    """
    num_tokens, num_experts = logits.shape[1:]
    means = _mean_over_tokens(shares, is_token)  # [B, E]
    if is_token is None:
        frequencies = loads / (num_tokens * num_chosen)  # [B, E]
    else:
        frequencies = loads / (count_tokens(is_token) * num_chosen)[:, None]
    balance = num_experts * (frequencies * means).sum(dim=-1)  # [B]
    return balance, _mean_over_tokens(logits.logsumexp(dim=-1).square(), is_token)


def get_entropy(shares: Tensor, *, is_token: Tensor | None = None) -> Tensor:
    """Return the mean entropy of the router scores per token in nats, [B]; ln E for uniform scores."""
    entropies: Tensor = torch.special.entr(shares.detach()).sum(dim=-1)  # [B, T]
    return _mean_over_tokens(entropies, is_token)


def count_tokens(is_token: Tensor) -> Tensor:
    """Return the number of tokens of each row, [B]; 1 for a row of padding alone, whose sums of 0 are divided by it."""
    return is_token.sum(dim=1).clamp(min=1)


def _mean_over_tokens(values: Tensor, is_token: Tensor | None) -> Tensor:
    """Return the mean over the tokens of each row, [B, …], of values [B, T, …]."""
    if is_token is None:
        return values.mean(dim=1)
    is_kept = is_token.view(*is_token.shape, *(1,) * (values.ndim - 2))  # [B, T, …]
    total = torch.where(is_kept, values, 0.0).sum(dim=1)  # [B, …]
    return total / count_tokens(is_token).view(-1, *(1,) * (values.ndim - 2))


def find_bias_steps(counts: Tensor) -> Tensor:
    """Return -1 for experts with more tokens than the mean of their layer, 1 for those with fewer, float32.

    Args:
        counts: [L, E], integer-valued.
    """
    return (counts.sum(dim=-1, keepdim=True) - counts.shape[-1] * counts).sign().float()


def describe_loads(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and smallest expert load over all layers, relative to the layer's mean; both 0-dim.

    Args:
        counts: [L, E].
    """
    loads = counts / counts.double().mean(dim=-1, keepdim=True)  # [L, E]
    return loads.max(), loads.min()
