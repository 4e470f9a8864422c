"""Losses of reinforcement learning from rewards: completions with a high reward become more probable.

A task samples completions, has them rewarded, and gives these losses the log-probability of each token, so they know no
model. Formulas and defaults are compared with TRL 1.16 (tests/recipes/loss/test_policy.py); where TRL differs from a
paper or from this module, the class says so.

Shapes: B completions of a micro-batch; T tokens of a row, prompt and padding included; N completions of a global batch.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.loss import NUM_TARGETS, Batch, Loss, Term
from recipes.numerics.loss import IGNORE_INDEX

NUM_COMPLETIONS = "num_completions"
Importance = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
_SMALLEST_STD = 1e-4  # added to a standard deviation of rewards, as in TRL


class PolicyOutputs(NamedTuple):
    """What a task tells the losses of its batch.

    Attributes:
        log_probs: [B, T] float32, log-probability of each token of the completion under the model, at the temperature
            of the sampler; 0 where there is no target; differentiable.
        entropy: [B, T] float32, in nats, differentiable if the loss has a term of it; None: not computed in this step.
        reference: [B, T] float32, `log_probs` under the reference model; None: the loss asks for none.
        values: [B, T] float32, estimate of the rewards from each token on; differentiable; None: the task has none.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None


class _Parts(NamedTuple):
    """Loss of each token and what it is made of, [B, T] each; `ratios` of a sequence [B, 1]."""

    losses: Tensor
    ratios: Tensor
    kl: Tensor | None


class PolicyLoss(Loss):
    """What the losses of policies share: clipped ratios, weights of a sampler's gap, and what is measured.

    With r = exp(log_prob - old_log_prob) the ratio of a token, and A its advantage, its loss without the term of a
    reference is -w min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A).

    Args:
        epsilon: How far below 1 a ratio has a gradient that lowers it further.
        epsilon_high: How far above 1 a ratio has a gradient that raises it further; None: `epsilon`.
        importance: w: 1 (`none`), or exp(old_log_prob - sampler_log_prob) of each token or of the whole sequence, where
            above the cap either the cap (`truncate`) or 0 (`mask`).
        importance_cap: Largest w.
        chunk_tokens: Tokens whose logits are in memory at a time; None: all of a micro-batch.

    Attributes:
        needs_reference: Whether it compares with a reference model.
        needs_values: Whether it reads a value of each token; a plain literal.
        needs_entropy: Whether it has a term of the entropy.
    """

    target_kinds: ClassVar[tuple[str, ...]] = ("completions",)
    is_validated: ClassVar[bool] = False
    needs_values: ClassVar[bool] = False
    needs_reference: bool = False
    needs_entropy: bool = False

    def __init__(
        self,
        *,
        epsilon: float,
        epsilon_high: float | None,
        importance: Importance,
        importance_cap: float,
        chunk_tokens: int | None,
    ) -> None:
        self._epsilon = epsilon
        self._epsilon_high = epsilon if epsilon_high is None else epsilon_high
        self._importance = importance
        self._importance_cap = importance_cap
        self.chunk_tokens = chunk_tokens

    @abstractmethod
    def describe_groups(self, rewards: Tensor, num_generations: int) -> dict[str, float]:
        """Return what is logged of the groups of a global batch, by name; arguments as in `GRPO.advantages`."""

    def _carries(self, batch: Batch) -> Tensor:
        """Return which tokens carry loss, [B, T]."""
        carries: Tensor = batch["targets"] != IGNORE_INDEX
        return carries

    @override
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {NUM_TARGETS: self._carries(batch).sum()}

    def _advantages(self, batch: Batch) -> Tensor:
        """Return the advantage of each token, [B, T], or of its completion, [B, 1]."""
        advantages: Tensor = batch["advantages"]
        return advantages[:, None] if advantages.ndim == 1 else advantages

    def _clip(self, ratios: Tensor, advantages: Tensor) -> Tensor:
        """Return the loss of ratios, [B, T] or [B, 1] as they are, without weights."""
        clipped = ratios.clamp(1 - self._epsilon, 1 + self._epsilon_high)
        return -torch.minimum(ratios * advantages, clipped * advantages)

    @torch.no_grad()
    def _weigh(self, outputs: PolicyOutputs, batch: Batch, carries: Tensor) -> Tensor:
        """Return the importance weight of each token, [B, T], or of each completion, [B, 1]."""
        if self._importance == "none":
            return outputs.log_probs.new_ones(())
        unit, _, above = self._importance.partition("_")
        gaps = torch.where(carries, old_log_probs(outputs, batch) - batch["sampler_log_probs"], 0.0)
        weights = (gaps.sum(dim=1, keepdim=True) if unit == "sequence" else gaps).exp()
        cap = self._importance_cap
        return weights.clamp(max=cap) if above == "truncate" else torch.where(weights > cap, 0.0, weights)

    @torch.no_grad()
    def _measure(self, outputs: PolicyOutputs, batch: Batch, *, ratios: Tensor, kl: Tensor | None) -> dict[str, Tensor]:
        """Return what is logged of each token, by name, [B, T] or, of its completion, [B, 1]."""
        advantages = self._advantages(batch)
        low = (ratios < 1 - self._epsilon) & (advantages < 0)
        high = (ratios > 1 + self._epsilon_high) & (advantages > 0)
        found = {
            "policy/clipped_fraction": (low | high).to(ratios),
            "policy/clipped_low_fraction": low.to(ratios),
            "policy/clipped_high_fraction": high.to(ratios),
        }
        if kl is not None:
            found["policy/kl"] = kl.detach()
        if outputs.entropy is not None:
            found["policy/entropy"] = outputs.entropy.detach()
        if "sampler_log_probs" in batch:
            # under the weights that sampled: at a later iteration the model is another one on purpose
            found["rollout/logprob_gap"] = (old_log_probs(outputs, batch) - batch["sampler_log_probs"]).abs()
        return found


class GRPO(PolicyLoss):
    """Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300), and its family.

    With A the advantage of a completion and r = exp(log_prob - old_log_prob) the ratio of a token, its loss is

        -w min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta r (exp(d) - d - 1),   d = reference - log_prob

    in which the last term estimates the KL divergence from the reference (k3, Schulman 2020); the factor r makes its
    gradient that of the divergence (arXiv 2512.02556; TRL's default from 1.16 on). w is the weight that corrects for a
    sampler whose log-probabilities differ from the model's. At the first iteration r is 1, and the gradient that of
    REINFORCE, -A log_prob. The kinds differ in what the sum of these losses is divided by:

    - `dapo`: tokens of the global batch (arXiv 2503.14476).
    - `bnpo`: the same here. TRL divides by the tokens of each micro-batch, so that its loss depends on the split.
    - `grpo`: tokens of each completion, then the number of completions: in a long one, a token counts less.
    - `dr_grpo`: completions times `max_new_tokens` (arXiv 2503.20783); the paper has `scale_rewards=none` with it.
    - `gspo`: as `grpo`, with one ratio per completion, the exponential of the mean of its log-ratios (arXiv
      2507.18071). Its clipping is two to three orders of magnitude closer: 3e-4 and 4e-4 in the paper.

    A group whose rewards are all equal has the advantage 0: it moves the model by the term of the divergence alone.

    Batch keys: `targets` [B, T], `IGNORE_INDEX` outside of the completion, whose end token is a target; `advantages`
    [B] float32; `old_log_probs` [B, T] under the weights that sampled, absent at the first iteration;
    `sampler_log_probs` [B, T] as the sampler computed them; `is_truncated` [B] bool, no end token.

    Args:
        kind: One of the five.
        baseline: What rewards are compared with: the mean of their `group`, of the others in it (`leave_one_out`, RLOO,
            arXiv 2402.14740) or of the global `batch` (with `scale_rewards=batch` REINFORCE++, arXiv 2501.03262).
        scale_rewards: Whether the difference is divided by the standard deviation of the rewards of its `group`, of
            the `batch`, or `none`.
        beta: Weight of the divergence from the reference; 0: no reference.
        mask_truncated: Whether tokens of completions without an end carry no loss. They stay in the number of
            completions, as in TRL.
        max_new_tokens: Length of the longest completion, which `dr_grpo` divides by; None: the rollout has none.
        epsilon: As the other arguments, see `PolicyLoss`.
    """

    count_names = (NUM_TARGETS, NUM_COMPLETIONS)
    measures: ClassVar[Mapping[str, str]] = {
        "policy/kl": "num_targets",
        "policy/entropy": "num_targets",
        "policy/clipped_fraction": "num_targets",
        "policy/clipped_low_fraction": "num_targets",
        "policy/clipped_high_fraction": "num_targets",
        "rollout/logprob_gap": "num_targets",
    }

    def __init__(
        self,
        *,
        kind: Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo"],
        baseline: Literal["group", "leave_one_out", "batch"],
        scale_rewards: Literal["group", "batch", "none"],
        epsilon: Annotated[float, "> 0"],
        epsilon_high: Annotated[float, "> 0"] | None,
        beta: Annotated[float, ">= 0"],
        mask_truncated: bool,
        importance: Importance,
        importance_cap: Annotated[float, "> 0"],
        max_new_tokens: Annotated[int, ">= 1"] | None,
        chunk_tokens: Annotated[int, ">= 1"] | None = None,
    ) -> None:
        if kind == "dr_grpo" and max_new_tokens is None:
            reason = "it divides by the length of the longest completion, which the rollout does not say"
            raise ConfigError("loss.kind=dr_grpo loss.max_new_tokens=null", reason, "loss.max_new_tokens=<tokens>")
        super().__init__(
            epsilon=epsilon,
            epsilon_high=epsilon_high,
            importance=importance,
            importance_cap=importance_cap,
            chunk_tokens=chunk_tokens,
        )
        self._kind = kind
        self._baseline = baseline
        self._scale_rewards = scale_rewards
        self._beta = beta
        self._mask_truncated = mask_truncated
        self._max_new_tokens = max_new_tokens
        self.needs_reference = beta > 0
        if not beta:  # nothing is measured against a reference that is not there
            self.measures = {name: per for name, per in type(self).measures.items() if name != "policy/kl"}  # type: ignore[misc]

    # Advantages: of the whole global batch, before the first forward pass.

    def advantages(self, rewards: Tensor, num_generations: int) -> Tensor:
        """Return the advantage of each completion over what it is compared with, [N] float64.

        Standard deviations are those of a sample (N - 1), as in TRL. With `leave_one_out` that of the batch is taken of
        the differences, as TRL's RLOO does, else of the rewards.

        Args:
            rewards: [N] float64, finite, of the whole global batch, one group after the other.
            num_generations: Completions of a group; 1 with `baseline=batch` alone.
        """
        groups = rewards.double().view(-1, num_generations)  # [N / G, G]
        compared = groups.view(1, -1) if self._baseline == "batch" else groups
        others = compared.shape[1] - 1
        assert others, "a reward that is compared with itself has no advantage"
        differences = compared - compared.mean(dim=1, keepdim=True)
        if self._baseline == "leave_one_out":
            differences = compared - (compared.sum(dim=1, keepdim=True) - compared) / others
        # the mean of equal numbers is another number in its last digit, which a small deviation would make an advantage
        differences = torch.where(_has_spread(compared), differences, 0.0)
        if self._scale_rewards == "group":
            assert self._baseline != "batch", "a group without spread may be far from the mean of the batch"
            differences = differences / (groups.std(dim=1, keepdim=True) + _SMALLEST_STD)
        elif self._scale_rewards == "batch":
            of_batch = differences if self._baseline == "leave_one_out" else groups
            differences = differences / (of_batch.std() + _SMALLEST_STD)
        return differences.flatten()

    @override
    def describe_groups(self, rewards: Tensor, num_generations: int) -> dict[str, float]:
        """Return the share of groups that have nothing to learn from, all rewards being equal.

        With `baseline=batch`, the batch is the one group. Arguments as in `advantages`.
        """
        groups = rewards.view(1, -1) if self._baseline == "batch" else rewards.view(-1, num_generations)
        return {"reward/no_spread_fraction": 1.0 - _has_spread(groups).double().mean().item()}

    # The loss of a micro-batch.

    @override
    def _carries(self, batch: Batch) -> Tensor:
        carries = super()._carries(batch)
        return carries & ~batch["is_truncated"][:, None] if self._mask_truncated else carries

    @override
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        # samples that only fill up have no target at all
        is_completion = (batch["targets"] != IGNORE_INDEX).any(dim=1)
        return {NUM_TARGETS: self._carries(batch).sum(), NUM_COMPLETIONS: is_completion.sum()}

    @override
    def complete(self, batch: Batch) -> dict[str, Any]:
        targets: Tensor = batch["targets"]
        names = ["old_log_probs", "sampler_log_probs"]
        names += ["reference_log_probs"] if self.needs_reference else []
        of_tokens = {name: targets.new_zeros(targets.shape, dtype=torch.float32) for name in names}
        of_samples = targets.new_zeros(len(targets), dtype=torch.float32)
        return {**batch, **of_tokens, "advantages": of_samples, "is_truncated": of_samples.bool()}

    @override
    def per_sample(self, outputs: PolicyOutputs, batch: Batch) -> Tensor:
        carries = self._carries(batch)
        return _mean_of_rows(self._of_tokens(outputs, batch, carries).losses, carries)

    @override
    def __call__(self, outputs: PolicyOutputs, batch: Batch) -> list[Term]:
        carries = self._carries(batch)
        parts = self._of_tokens(outputs, batch, carries)
        if self._kind in ("grpo", "gspo"):
            loss = Term(_mean_of_rows(parts.losses, carries).sum(), per=NUM_COMPLETIONS)
        elif self._kind == "dr_grpo":
            assert self._max_new_tokens is not None
            loss = Term(parts.losses.sum() / self._max_new_tokens, per=NUM_COMPLETIONS)
        else:
            loss = Term(parts.losses.sum(), per=NUM_TARGETS)
        measured = self._measure(outputs, batch, ratios=parts.ratios, kl=parts.kl)
        return [loss, *make_measures(measured, carries)]

    def _of_tokens(self, outputs: PolicyOutputs, batch: Batch, carries: Tensor) -> _Parts:
        """Return the loss of each token, 0 where there is none, and its parts."""
        log_probs = outputs.log_probs
        # of a first iteration the ratio is 1 to the last bit, and has the gradient of the log-probability
        log_ratios = torch.where(carries, log_probs - old_log_probs(outputs, batch), 0.0)
        ratios = (_mean_of_rows(log_ratios, carries)[:, None] if self._kind == "gspo" else log_ratios).exp()
        losses = self._clip(ratios, self._advantages(batch)) * self._weigh(outputs, batch, carries)
        if not self.needs_reference:
            return _Parts(torch.where(carries, losses, 0.0), ratios, None)
        assert outputs.reference is not None, "it needs a reference"
        d = torch.where(carries, outputs.reference - log_probs, 0.0)
        kl = ratios * (torch.expm1(d) - d)
        return _Parts(torch.where(carries, losses + self._beta * kl, 0.0), ratios, kl)


def make_measures(measured: Mapping[str, Tensor], carries: Tensor) -> list[Term]:
    """Return terms that are logged alone, of values [B, T] or [B, 1] of the tokens that carry loss."""
    return [
        Term(torch.where(carries, values, 0.0).sum(), per=NUM_TARGETS, weight=0.0, in_loss=False, logged_as=name)
        for name, values in measured.items()
    ]


def old_log_probs(outputs: PolicyOutputs, batch: Batch) -> Tensor:
    """Return the log-probabilities under the weights that sampled: at the first iteration the model's own, [B, T]."""
    old: Tensor = batch.get("old_log_probs", outputs.log_probs.detach())
    return old


def _has_spread(groups: Tensor) -> Tensor:
    """Return which groups [M, G] have two different rewards, [M, 1]."""
    return groups.amax(dim=1, keepdim=True) > groups.amin(dim=1, keepdim=True)


def _mean_of_rows(values: Tensor, carries: Tensor) -> Tensor:
    """Return the mean over the tokens of each row that carry loss, [B]; 0 without any. Values elsewhere are 0."""
    return values.sum(dim=1) / carries.sum(dim=1).clamp(min=1)
