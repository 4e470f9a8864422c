"""Proximal policy optimization: every token has an advantage of its own, from the values that the policy predicts.

Shapes: R completions of a rank; B of a micro-batch; N of all ranks; T tokens of a row, prompt and padding included.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from recipes.loss import NUM_TARGETS, Batch, Term
from recipes.loss.policy import Importance, PolicyLoss, PolicyOutputs, make_measures, old_log_probs

KLEstimator = Literal["k1", "k3"]
_LARGEST_ERROR = 0.2  # of the controller of the KL divergence, relative to its target, as in Ziegler et al. 2019
_SMALLEST_VARIANCE = 1e-8  # added to that which values are divided by the root of, as in TRL


class Estimates(NamedTuple):
    """What a rollout tells the steps that learn from it.

    Attributes:
        advantages: [R, T] float32, 0 outside of completions.
        returns: [R, T] float32, what the values are to become; 0 outside of completions.
        logged: What is logged of the rollout, by name.
    """

    advantages: Tensor
    returns: Tensor
    logged: dict[str, float]


class PPO(PolicyLoss):
    """Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347) of language models (arXiv 1909.08593).

    The reward of a token is 0, of the last one of a completion its score, less `missing_end_penalty` if it has no end,
    and less `kl_weight` times the divergence of the policy from the reference at this token. With V the values that
    the policy predicted when it sampled, advantages are those of generalized advantage estimation (arXiv 1506.02438),

        A_t = d_t + gamma gae_lambda A_{t + 1},   d_t = reward_t + gamma V_{t + 1} - V_t,

    in which nothing follows the last token, whether or not it is an end. Returns are A + V; after that, advantages are
    shifted and scaled to the mean 0 and the variance 1 over the tokens of the whole rollout. The loss of a token is

        -w min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + value_weight max((v - return)^2, (c - return)^2) / 2

    with v the value that it predicts now, and c the same, at most `value_epsilon` away from V. All sums are divided by
    the tokens of the global batch. Formulas are compared with TRL 0.24 (tests/recipes/loss/test_ppo.py), which gives
    the score to the token after the end, and whitens over the completions of one rank.

    Batch keys: `targets` [B, T], `IGNORE_INDEX` outside of the completion, whose end token is a target; `advantages`,
    `returns` and `old_values` [B, T] float32; `old_log_probs` [B, T] under the weights that sampled, absent at the
    first iteration; `sampler_log_probs` [B, T] as the sampler computed them.

    Args:
        value_epsilon: How far a value has a gradient away from that at sampling; None: however far.
        value_weight: Weight of the loss of values.
        gamma: How much less a reward counts for each token before it: 1, as it is.
        gae_lambda: 1: an advantage is that of all rewards that follow; 0: that of one token and the value after it.
        whiten_advantages: Whether advantages are shifted and scaled over the rollout.
        whiten_rewards: Whether rewards of tokens are scaled over the rollout; their mean stays.
        kl_weight: Weight of the divergence from the reference; 0: no reference.
        kl_in: Whether the divergence is a part of the rewards, or of the loss.
        kl_estimator: With d = reference - log_prob, the divergence at a token is -d (`k1`), or exp(d) - d - 1 (`k3`,
            Schulman 2020). In the loss it is multiplied by the ratio, as in `GRPO`.
        kl_target: Nats of a completion that `kl_weight` is controlled towards; None: it stays.
        kl_horizon: Completions in which a divergence far from the target changes the weight by a fifth.
        missing_end_penalty: What a completion without an end loses of its score.
        entropy_weight: Weight of the entropy of each token, which the loss raises.
        epsilon: As the other arguments, see `PolicyLoss`.

    Attributes:
        kl_weight: Weight of the divergence.
        adapts: Whether it follows a target, and is part of the train state.
    """

    needs_values: ClassVar[bool] = True
    measures: ClassVar[Mapping[str, str]] = {
        "policy/kl": "num_targets",
        "policy/entropy": "num_targets",
        "policy/clipped_fraction": "num_targets",
        "policy/clipped_low_fraction": "num_targets",
        "policy/clipped_high_fraction": "num_targets",
        "rollout/logprob_gap": "num_targets",
        "value/loss": "num_targets",
        "value/clipped_fraction": "num_targets",
    }

    def __init__(
        self,
        *,
        epsilon: Annotated[float, "> 0"],
        epsilon_high: Annotated[float, "> 0"] | None,
        value_epsilon: Annotated[float, "> 0"] | None,
        value_weight: Annotated[float, "> 0"],
        gamma: Annotated[float, "> 0", "<= 1"],
        gae_lambda: Annotated[float, ">= 0", "<= 1"],
        whiten_advantages: bool,
        whiten_rewards: bool,
        kl_weight: Annotated[float, ">= 0"],
        kl_in: Literal["reward", "loss"],
        kl_estimator: KLEstimator,
        kl_target: Annotated[float, "> 0"] | None,
        kl_horizon: Annotated[int, ">= 1"],
        missing_end_penalty: Annotated[float, ">= 0"],
        entropy_weight: Annotated[float, ">= 0"],
        importance: Importance,
        importance_cap: Annotated[float, "> 0"],
        chunk_tokens: Annotated[int, ">= 1"] | None = None,
    ) -> None:
        super().__init__(
            epsilon=epsilon,
            epsilon_high=epsilon_high,
            importance=importance,
            importance_cap=importance_cap,
            chunk_tokens=chunk_tokens,
        )
        self._value_epsilon = value_epsilon
        self._value_weight = value_weight
        self._gamma = gamma
        self._gae_lambda = gae_lambda
        self._whiten_advantages = whiten_advantages
        self._whiten_rewards = whiten_rewards
        self.kl_weight = kl_weight
        self._kl_in = kl_in
        self._kl_estimator: KLEstimator = kl_estimator
        self._kl_target = kl_target
        self._kl_horizon = kl_horizon
        self.adapts = kl_target is not None
        self._missing_end_penalty = missing_end_penalty
        self._entropy_weight = entropy_weight
        self.needs_reference = kl_weight > 0
        self.needs_entropy = entropy_weight > 0
        if not kl_weight:  # nothing is measured against a reference that is not there
            self.measures = {name: per for name, per in type(self).measures.items() if name != "policy/kl"}  # type: ignore[misc]

    @override
    def describe_groups(self, rewards: Tensor, num_generations: int) -> dict[str, float]:
        return {}  # values are what rewards are compared with

    # The rollout: before the first step that learns from it.

    @torch.no_grad()
    def estimate(
        self,
        scores: Tensor,
        is_truncated: Tensor,
        is_token: Tensor,
        *,
        values: Tensor,
        log_probs: Tensor,
        reference: Tensor | None,
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> Estimates:
        """Return advantages and returns, computed in float64, and adapt the weight of the divergence. Collective.

        With a target, the weight is adapted to the divergence of this rollout before it enters the rewards.

        Args:
            scores: [R] float64.
            is_truncated: [R] bool, no end token.
            is_token: [R, T] bool, tokens of the completion, its end included.
            values: [R, T] as predicted before each token.
            log_probs: [R, T] of the tokens under the weights that sampled.
            reference: [R, T] the same under the reference; None if there is none.
            sum_over_ranks: Adds a tensor of float64 of each rank, and returns the sum on each of them.
        """
        values = torch.where(is_token, values.double(), 0.0)
        rewards = self._reward_tokens(scores, is_truncated, is_token)
        logged = {}
        if self.needs_reference:
            assert reference is not None, "it needs a reference"
            kl = estimate_kl(torch.where(is_token, reference.double() - log_probs.double(), 0.0), self._kl_estimator)
            self._adapt(sum_over_ranks(torch.stack([kl.sum(), is_token.any(dim=1).sum()])))
            logged["policy/kl_weight"] = self.kl_weight
            if self._kl_in == "reward":
                rewards = rewards - self.kl_weight * kl
        if self._whiten_rewards:
            moments = _Moments.of(rewards, is_token, sum_over_ranks)
            rewards = torch.where(is_token, moments.whiten(rewards) + moments.mean, 0.0)
        advantages = estimate_advantages(rewards, values, is_token, gamma=self._gamma, gae_lambda=self._gae_lambda)
        returns = advantages + values
        of_errors, of_returns = (_Moments.of(each, is_token, sum_over_ranks) for each in (advantages, returns))
        if of_returns.variance > 0:
            logged["value/explained_variance"] = (1 - of_errors.variance / of_returns.variance).item()
        if self._whiten_advantages:
            advantages = torch.where(is_token, of_errors.whiten(advantages), 0.0)
        return Estimates(advantages.float(), returns.float(), logged)

    def _reward_tokens(self, scores: Tensor, is_truncated: Tensor, is_token: Tensor) -> Tensor:
        """Return the reward of each token without the divergence, [R, T] float64: the score, at the last token."""
        penalized = scores.double() - self._missing_end_penalty * is_truncated
        is_followed = torch.nn.functional.pad(is_token[:, 1:], (0, 1))  # [R, T]
        return torch.where(is_token & ~is_followed, penalized[:, None], 0.0)

    def _adapt(self, sums: Tensor) -> None:
        """Change the weight of the divergence, given its sum over all completions and their number, [2]."""
        if self._kl_target is None:
            return
        divergence, number = sums.tolist()
        error = divergence / number / self._kl_target - 1
        clipped = min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
        self.kl_weight *= 1 + clipped * number / self._kl_horizon

    # The loss of a micro-batch.

    @override
    def complete(self, batch: Batch) -> dict[str, Any]:
        targets: Tensor = batch["targets"]
        names = ["old_log_probs", "sampler_log_probs", "old_values", "advantages", "returns"]
        names += ["reference_log_probs"] if self.needs_reference else []
        return {**batch, **{name: targets.new_zeros(targets.shape, dtype=torch.float32) for name in names}}

    @override
    def per_sample(self, outputs: PolicyOutputs, batch: Batch) -> Tensor:
        carries = self._carries(batch)
        parts = self._of_tokens(outputs, batch, carries)
        whole = parts.policy + self._value_weight * parts.values - self._entropy_weight * parts.entropy
        return whole.sum(dim=1) / carries.sum(dim=1).clamp(min=1)

    @override
    def __call__(self, outputs: PolicyOutputs, batch: Batch) -> list[Term]:
        carries = self._carries(batch)
        parts = self._of_tokens(outputs, batch, carries)
        measured = self._measure(outputs, batch, ratios=parts.ratios, kl=parts.kl)
        measured["value/clipped_fraction"] = parts.is_clipped.to(parts.values)
        terms = [
            Term(parts.policy.sum(), per=NUM_TARGETS),
            Term(parts.values.sum(), per=NUM_TARGETS, weight=self._value_weight, logged_as="value/loss"),
        ]
        if self.needs_entropy:
            terms.append(Term(-parts.entropy.sum(), per=NUM_TARGETS, weight=self._entropy_weight))
        return [*terms, *make_measures(measured, carries)]

    def _of_tokens(self, outputs: PolicyOutputs, batch: Batch, carries: Tensor) -> "_Parts":
        """Return the losses of each token, 0 where there is none."""
        assert outputs.values is not None, "it needs values"
        log_ratios = torch.where(carries, outputs.log_probs - old_log_probs(outputs, batch), 0.0)
        ratios = log_ratios.exp()
        policy = self._clip(ratios, self._advantages(batch)) * self._weigh(outputs, batch, carries)
        kl = None
        if self.needs_reference:
            assert outputs.reference is not None, "it needs a reference"
            d = torch.where(carries, outputs.reference - outputs.log_probs, 0.0)
            kl = estimate_kl(d, self._kl_estimator)
            if self._kl_in == "loss":
                policy = policy + self.kl_weight * ratios * kl
        values, is_clipped = self._of_values(torch.where(carries, outputs.values, 0.0), batch)
        entropy = torch.zeros_like(policy)
        if self.needs_entropy:
            assert outputs.entropy is not None, "it has a term of the entropy"
            entropy = torch.where(carries, outputs.entropy, 0.0)
        policy, values = (torch.where(carries, losses, 0.0) for losses in (policy, values))
        return _Parts(policy, values, entropy, ratios, kl, is_clipped)

    def _of_values(self, values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each value, and whether the clipped one is the larger, [B, T] each."""
        losses = (values - batch["returns"]).square() / 2
        if self._value_epsilon is None:
            return losses, torch.zeros_like(losses, dtype=torch.bool)
        old: Tensor = batch["old_values"]
        near = torch.clamp(values, old - self._value_epsilon, old + self._value_epsilon)
        of_near = (near - batch["returns"]).square() / 2
        return torch.maximum(losses, of_near), of_near > losses


class _Parts(NamedTuple):
    """What the losses of tokens are made of, [B, T] each."""

    policy: Tensor
    values: Tensor
    entropy: Tensor
    ratios: Tensor
    kl: Tensor | None
    is_clipped: Tensor


def estimate_kl(d: Tensor, kind: KLEstimator) -> Tensor:
    """Return the divergence of a policy at each token that it sampled, given d = log p(reference) - log p(policy)."""
    return -d if kind == "k1" else torch.expm1(d) - d


def estimate_advantages(
    rewards: Tensor, values: Tensor, is_token: Tensor, *, gamma: float, gae_lambda: float
) -> Tensor:
    """Return the advantage of each token by generalized advantage estimation, [R, T], 0 outside of completions.

    Args:
        rewards: [R, T] of each token.
        values: [R, T] predicted before each token.
        is_token: [R, T] bool, tokens of the completion, one after the other.
        gamma: How much less a reward counts for each token before it.
        gae_lambda: 1: all rewards that follow count; 0: one, and the value after it.
    """
    advantages = torch.zeros_like(rewards)
    following = next_values = rewards.new_zeros(len(rewards))
    for place in range(rewards.shape[1] - 1, -1, -1):
        of_place = is_token[:, place]
        error = rewards[:, place] + gamma * next_values - values[:, place]
        following = torch.where(of_place, error + gamma * gae_lambda * following, 0.0)
        next_values = torch.where(of_place, values[:, place], 0.0)
        advantages[:, place] = following
    return advantages


class _Moments(NamedTuple):
    """Mean and variance (N - 1) of values of all tokens of all ranks, 0-dim float64."""

    mean: Tensor
    variance: Tensor

    @classmethod
    def of(cls, values: Tensor, is_token: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> "_Moments":
        own = torch.where(is_token, values, 0.0)
        total, number = sum_over_ranks(torch.stack([own.sum(), is_token.sum()]))
        mean = total / number.clamp(min=1)
        squares = torch.where(is_token, (values - mean).square(), 0.0)
        return cls(mean, sum_over_ranks(squares.sum()) / (number - 1).clamp(min=1))

    def whiten(self, values: Tensor) -> Tensor:
        """Return values with the mean 0 and the variance 1."""
        return (values - self.mean) * torch.rsqrt(self.variance + _SMALLEST_VARIANCE)
