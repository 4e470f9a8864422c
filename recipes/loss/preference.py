"""Losses on preferences: which of two answers is better, or whether one is good.

A task gives these losses the log-probability of each answer, so they know no tokens and no model. Formulas and defaults
are compared with TRL 1.16 (tests/recipes/loss/test_preference.py); where TRL differs from the paper, the class says so.

Shapes: B samples; K answers of a sample, 2 of a pair, the chosen one first, or 1; T tokens of a row.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.loss import Batch, Loss, Term
from recipes.numerics.loss import IGNORE_INDEX

NUM_PAIRS, NUM_EXAMPLES = "num_pairs", "num_examples"
_LARGEST_MEAN = -1e-6  # of log-probabilities: at 0 the odds of an answer are infinite


class Likelihoods(NamedTuple):
    """What a task tells the losses of its batch.

    Attributes:
        log_probs: [B, K] float32, log-probability of each answer, summed over its tokens; differentiable.
        reference: [B, K] float32, the same under the reference model; None: the loss asks for none.
        of_prompts: [B] float32, log-probability of the prompt of the first answer; None unless `reads_prompts`.
        kl: [] float32, of KTO: mean log-ratio of answers to other prompts over the global batch, at least 0.
    """

    log_probs: Tensor
    reference: Tensor | None = None
    of_prompts: Tensor | None = None
    kl: Tensor | None = None


def count_tokens(batch: Batch, *, num_answers: int) -> Tensor:
    """Return the number of tokens of each answer, [B, K] int64; 0 in samples that only fill up a validation."""
    lengths: Tensor = (batch["targets"] != IGNORE_INDEX).sum(dim=1).unflatten(0, (-1, num_answers))
    return lengths


def _complete(batch: Batch, *, num_answers: int) -> dict[str, Any]:
    """Return a batch of rows of T tokens with K answers of each sample, see `recipes.data.preferences`."""
    inputs, targets = (batch[name].repeat_interleave(num_answers, dim=0) for name in ("inputs", "targets"))
    size, length = batch["inputs"].shape
    known = {"margin": inputs.new_zeros(size, dtype=torch.float32), "label": inputs.new_ones(size, dtype=torch.float32)}
    others = {"other_inputs": batch["inputs"], "other_targets": batch["targets"], "id": inputs.new_zeros(size)}
    known["reference"] = inputs.new_zeros((size, num_answers + 1), dtype=torch.float32)
    rows = {"inputs": inputs, "targets": targets, "num_inputs": inputs.new_full((len(inputs),), length)}
    return {**batch, **rows, **known, **others, "kl": inputs.new_zeros((), dtype=torch.float32)}


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of x < 0: `log1p(-exp(x))` is -inf for |x| below the rounding of 1."""
    is_near = x > -0.6931471805599453  # log 2: beyond it the other form is the more exact one (Maechler 2012)
    return torch.where(
        is_near,
        torch.log(-torch.expm1(torch.where(is_near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(is_near, -1.0, x))),
    )


class AnswerLoss(Loss):
    """A loss of the log-probabilities of answers.

    Attributes:
        reads: What it compares, for `recipes.config.check.preference`.
        num_answers: K.
        needs_reference: Whether it compares with a reference model.
        reads_prompts: Whether it also trains on the prompts.
        reads_kl: Whether it reads the mean log-ratio of answers to other prompts.
        chunk_tokens: Tokens whose logits are in memory at a time; None: all of a micro-batch.
    """

    reads: ClassVar[str] = "log-probabilities"
    num_answers: ClassVar[int] = 2
    needs_reference: ClassVar[bool] = True
    reads_prompts: ClassVar[bool] = False
    reads_kl: ClassVar[bool] = False

    def __init__(self, *, chunk_tokens: Annotated[int, ">= 1"] | None = None) -> None:
        self.chunk_tokens = chunk_tokens

    @override
    def complete(self, batch: Batch) -> dict[str, Any]:
        return _complete(batch, num_answers=self.num_answers)

    @override
    def per_sample(self, outputs: Likelihoods, batch: Batch) -> Tensor:
        return self.losses(outputs, count_tokens(batch, num_answers=self.num_answers), batch)

    @abstractmethod
    def losses(self, outputs: Likelihoods, lengths: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each sample, [B] float32; anything for samples without tokens.

        Args:
            outputs: Log-probabilities.
            lengths: [B, K], tokens of the answers.
            batch: The batch.
        """


def _sum(values: Tensor, carries: Tensor) -> Tensor:
    """Return the sum of the values [B] of samples that carry loss, 0-dim."""
    return torch.where(carries, values, 0.0).sum()


class PairLoss(AnswerLoss):
    """A loss of pairs, divided by their number; and the cross-entropy of the chosen answers if `nll_weight` is set.

    Args:
        beta: Factor of the rewards.
        nll_weight: Weight of the mean cross-entropy of the tokens of chosen answers, which keeps their probability
            from falling (RPO, arXiv 2404.19733); 0: none.
        chunk_tokens: As in `AnswerLoss`.
    """

    target_kinds: ClassVar[tuple[str, ...]] = ("pairs",)
    measures: ClassVar[Mapping[str, str]] = {
        "accuracy": "num_pairs",
        "margin": "num_pairs",
        "chosen_reward": "num_pairs",
        "rejected_reward": "num_pairs",
        "chosen_log_prob": "num_pairs",
        "rejected_log_prob": "num_pairs",
        "chosen_length": "num_pairs",
        "rejected_length": "num_pairs",
    }
    higher_is_better: ClassVar[tuple[str, ...]] = ("accuracy", "margin", "chosen_reward", "chosen_log_prob")

    def __init__(
        self,
        *,
        beta: Annotated[float, "> 0"],
        nll_weight: Annotated[float, ">= 0"] = 0.0,
        chunk_tokens: Annotated[int, ">= 1"] | None = None,
    ) -> None:
        super().__init__(chunk_tokens=chunk_tokens)
        self.beta = beta
        self.nll_weight = nll_weight
        self.count_names = (NUM_PAIRS, "num_chosen_tokens") if self._trains_on_tokens else (NUM_PAIRS,)

    @property
    def _trains_on_tokens(self) -> bool:
        return self.nll_weight > 0

    @abstractmethod
    def rewards(self, outputs: Likelihoods, lengths: Tensor) -> Tensor:
        """Return the implicit reward of each answer, [B, 2] float32."""

    @override
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        lengths = count_tokens(batch, num_answers=2)  # [B, 2]
        counts = {NUM_PAIRS: (lengths > 0).all(dim=1).sum()}
        chosen = {"num_chosen_tokens": self._count_chosen(batch, lengths).sum()} if self._trains_on_tokens else {}
        return counts | chosen

    def _count_chosen(self, batch: Batch, lengths: Tensor) -> Tensor:
        """Return the number of tokens of each sample that the cross-entropy is divided by, [B]."""
        return lengths[:, 0]

    def _chosen_log_probs(self, outputs: Likelihoods) -> Tensor:
        """Return the log-probability of these tokens, [B]."""
        log_probs = outputs.log_probs[:, 0]
        return log_probs if outputs.of_prompts is None else log_probs + outputs.of_prompts

    @override
    def per_sample(self, outputs: Likelihoods, batch: Batch) -> Tensor:
        losses = super().per_sample(outputs, batch)
        if not self._trains_on_tokens:
            return losses
        num_tokens = self._count_chosen(batch, count_tokens(batch, num_answers=2)).clamp(min=1)
        return losses - self._weight_of_tokens * self._chosen_log_probs(outputs) / num_tokens

    @override
    def counts_of_sample(self, num_targets: int | None) -> dict[str, int] | None:
        return None if self._trains_on_tokens else {NUM_PAIRS: 1}

    @override
    def __call__(self, outputs: Likelihoods, batch: Batch) -> list[Term]:
        lengths = count_tokens(batch, num_answers=2)  # [B, 2]
        carries = (lengths > 0).all(dim=1)  # [B]
        terms = [Term(_sum(self.losses(outputs, lengths, batch), carries), per=NUM_PAIRS)]
        if self._trains_on_tokens:
            loss = _sum(-self._chosen_log_probs(outputs), carries)
            terms.append(Term(loss, per="num_chosen_tokens", weight=self._weight_of_tokens))
        return terms + self._measure(outputs, lengths, carries)

    @property
    def _weight_of_tokens(self) -> float:
        return self.nll_weight

    @torch.no_grad()
    def _measure(self, outputs: Likelihoods, lengths: Tensor, carries: Tensor) -> list[Term]:
        return [
            Term(_sum(value.detach(), carries), per=NUM_PAIRS, weight=0.0, in_loss=False, logged_as=name)
            for name, value in self._measures_of_pairs(outputs, lengths).items()
        ]

    def _measures_of_pairs(self, outputs: Likelihoods, lengths: Tensor) -> dict[str, Tensor]:
        """Return what is logged of each pair, by name, [B] each."""
        rewards = self.rewards(outputs, lengths)  # [B, 2]
        chosen, rejected = rewards.unbind(dim=1)
        return {
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "chosen_log_prob": outputs.log_probs[:, 0],
            "rejected_log_prob": outputs.log_probs[:, 1],
            "chosen_length": lengths[:, 0].float(),
            "rejected_length": lengths[:, 1].float(),
        }


class DPO(PairLoss):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290), and its family.

    With D the log-ratio of the chosen answer to the reference less that of the rejected one, and s the smoothing:

    - `sigmoid`: -(1 - s) log sigmoid(beta D) - s log sigmoid(-beta D); with s > 0 conservative DPO (Mitchell 2023).
      TRL 1.16 ignores s here, torchtune reads it.
    - `robust`: (-(1 - s) log sigmoid(beta D) + s log sigmoid(-beta D)) / (1 - 2 s), for labels of which a share s is
      flipped (arXiv 2403.00409).
    - `hinge`: max(0, 1 - beta D) (SLiC, arXiv 2305.10425).
    - `ipo`: (D' - 1 / (2 beta))^2, with log-ratios per token, as its authors have corrected it (arXiv 2310.12036).

    Args:
        beta: Strength of the tie to the reference: with a small one the model moves further from it.
        kind: One of the four.
        label_smoothing: s.
        nll_weight: As in `PairLoss`.
        chunk_tokens: As in `AnswerLoss`.
    """

    measures: ClassVar[Mapping[str, str]] = {
        "accuracy": "num_pairs",
        "margin": "num_pairs",
        "chosen_reward": "num_pairs",
        "rejected_reward": "num_pairs",
        "chosen_log_prob": "num_pairs",
        "rejected_log_prob": "num_pairs",
        "chosen_log_ratio": "num_pairs",
        "rejected_log_ratio": "num_pairs",
        "chosen_length": "num_pairs",
        "rejected_length": "num_pairs",
    }

    def __init__(
        self,
        *,
        beta: Annotated[float, "> 0"],
        kind: Literal["sigmoid", "robust", "hinge", "ipo"],
        label_smoothing: Annotated[float, ">= 0, < 0.5"],
        nll_weight: Annotated[float, ">= 0"],
        chunk_tokens: Annotated[int, ">= 1"] | None = None,
    ) -> None:
        super().__init__(beta=beta, nll_weight=nll_weight, chunk_tokens=chunk_tokens)
        if label_smoothing and kind in ("hinge", "ipo"):
            reason = f"the loss of kind {kind} has no probability to smooth"
            fix = "loss.kind=sigmoid or robust, or loss.label_smoothing=0"
            raise ConfigError(f"loss.label_smoothing={label_smoothing} loss.kind={kind}", reason, fix)
        self._kind = kind
        self._label_smoothing = label_smoothing

    @override
    def rewards(self, outputs: Likelihoods, lengths: Tensor) -> Tensor:
        return self.beta * self._log_ratios(outputs, lengths)

    @override
    def _measures_of_pairs(self, outputs: Likelihoods, lengths: Tensor) -> dict[str, Tensor]:
        # no KL divergence, which is a mean over answers of the trained model itself: these were given
        assert outputs.reference is not None, "it needs a reference"
        ratios = (outputs.log_probs - outputs.reference) / lengths.clamp(min=1)  # [B, 2], per token
        of_both = {"chosen_log_ratio": ratios[:, 0], "rejected_log_ratio": ratios[:, 1]}
        return super()._measures_of_pairs(outputs, lengths) | of_both

    def _log_ratios(self, outputs: Likelihoods, lengths: Tensor) -> Tensor:
        assert outputs.reference is not None, "it needs a reference"
        ratios = outputs.log_probs - outputs.reference  # [B, 2]
        return ratios / lengths.clamp(min=1) if self._kind == "ipo" else ratios

    @override
    def losses(self, outputs: Likelihoods, lengths: Tensor, batch: Batch) -> Tensor:
        chosen, rejected = self._log_ratios(outputs, lengths).unbind(dim=1)
        margin, smoothing = chosen - rejected, self._label_smoothing  # [B]
        if self._kind == "hinge":
            return torch.relu(1 - self.beta * margin)
        if self._kind == "ipo":
            return (margin - 1 / (2 * self.beta)).square()
        right, wrong = F.logsigmoid(self.beta * margin), F.logsigmoid(-self.beta * margin)
        if self._kind == "robust":
            return (smoothing * wrong - (1 - smoothing) * right) / (1 - 2 * smoothing)
        return -(1 - smoothing) * right - smoothing * wrong


class SimPO(PairLoss):
    """SimPO (Meng et al. 2024, arXiv 2405.14734): the mean log-probability of a token is the reward, without reference.

    The loss is -log sigmoid(beta (m_chosen - m_rejected) - simpo_gamma), with m the mean over the tokens of an answer.

    Args:
        beta: Factor of the rewards; 2 to 10 in the paper.
        simpo_gamma: Reward by which the chosen answer should be ahead; half of beta or less.
        nll_weight: As in `PairLoss`; TRL's `cpo_alpha`.
        chunk_tokens: As in `AnswerLoss`.
    """

    needs_reference: ClassVar[bool] = False

    def __init__(
        self,
        *,
        beta: Annotated[float, "> 0"],
        simpo_gamma: Annotated[float, ">= 0"],
        nll_weight: Annotated[float, ">= 0"],
        chunk_tokens: Annotated[int, ">= 1"] | None = None,
    ) -> None:
        super().__init__(beta=beta, nll_weight=nll_weight, chunk_tokens=chunk_tokens)
        self._gamma = simpo_gamma

    @override
    def rewards(self, outputs: Likelihoods, lengths: Tensor) -> Tensor:
        return self.beta * outputs.log_probs / lengths.clamp(min=1)

    @override
    def losses(self, outputs: Likelihoods, lengths: Tensor, batch: Batch) -> Tensor:
        chosen, rejected = self.rewards(outputs, lengths).unbind(dim=1)
        return -F.logsigmoid(chosen - rejected - self._gamma)


class ORPO(PairLoss):
    """ORPO (Hong et al. 2024, arXiv 2403.07691): cross-entropy of the chosen answer, and the odds of both, at once.

    The cross-entropy covers the prompt, too, as in the authors' code and in TRL. The second term is -beta log sigmoid
    of the log odds ratio, with the probability of an answer as the geometric mean over its tokens. No reference.

    Args:
        beta: Weight of the odds ratio; lambda in the paper.
        chunk_tokens: As in `AnswerLoss`.
    """

    needs_reference: ClassVar[bool] = False
    reads_prompts: ClassVar[bool] = True

    def __init__(self, *, beta: Annotated[float, "> 0"], chunk_tokens: Annotated[int, ">= 1"] | None = None) -> None:
        super().__init__(beta=beta, chunk_tokens=chunk_tokens)

    @property
    @override
    def _trains_on_tokens(self) -> bool:
        return True

    @property
    @override
    def _weight_of_tokens(self) -> float:
        return 1.0

    @override
    def _count_chosen(self, batch: Batch, lengths: Tensor) -> Tensor:
        num_inputs: Tensor = batch["num_inputs"]  # [2 B], each with its successor
        return num_inputs[0::2]

    @override
    def rewards(self, outputs: Likelihoods, lengths: Tensor) -> Tensor:
        return self.beta * outputs.log_probs / lengths.clamp(min=1)

    @override
    def losses(self, outputs: Likelihoods, lengths: Tensor, batch: Batch) -> Tensor:
        means = (outputs.log_probs / lengths.clamp(min=1)).clamp(max=_LARGEST_MEAN)  # [B, 2]
        chosen, rejected = (means - log1mexp(means)).unbind(dim=1)  # log odds
        return -self.beta * F.logsigmoid(chosen - rejected)


class KTO(AnswerLoss):
    """KTO (Ethayarajh et al. 2024, arXiv 2402.01306): single answers, each of which is good or bad.

    With r the log-ratio of an answer to the reference and z the KL divergence from it, a good answer has the loss
    desirable_weight (1 - sigmoid(beta (r - z))), a bad one undesirable_weight (1 - sigmoid(beta (z - r))). z is the
    mean log-ratio of answers to other prompts, at least 0, over the global batch: TRL takes that of each micro-batch on
    its rank, and its loss then depends on how the batch is split.

    Args:
        beta: Strength of the tie to the reference.
        desirable_weight: Weight of good answers. The authors advise weights by which good answers count 1 to 4/3 times
            as much as bad ones, all taken together.
        undesirable_weight: Weight of bad answers.
        chunk_tokens: As in `AnswerLoss`.
    """

    target_kinds: ClassVar[tuple[str, ...]] = ("answers",)
    num_answers: ClassVar[int] = 1
    reads_kl: ClassVar[bool] = True
    count_names = (NUM_EXAMPLES, "num_desirable", "num_undesirable")
    measures: ClassVar[Mapping[str, str]] = {
        "kl": "num_examples",
        "chosen_reward": "num_desirable",
        "rejected_reward": "num_undesirable",
        "chosen_log_prob": "num_desirable",
        "rejected_log_prob": "num_undesirable",
        "chosen_length": "num_desirable",
        "rejected_length": "num_undesirable",
    }
    higher_is_better: ClassVar[tuple[str, ...]] = ("chosen_reward", "chosen_log_prob")

    def __init__(
        self,
        *,
        beta: Annotated[float, "> 0"],
        desirable_weight: Annotated[float, "> 0"],
        undesirable_weight: Annotated[float, "> 0"],
        chunk_tokens: Annotated[int, ">= 1"] | None = None,
    ) -> None:
        super().__init__(chunk_tokens=chunk_tokens)
        self._beta = beta
        self._weights = desirable_weight, undesirable_weight

    def _masks(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return which samples are good and which bad, [B] each; neither if they only fill up."""
        carries = count_tokens(batch, num_answers=1)[:, 0] > 0  # [B]
        return carries & (batch["label"] > 0), carries & (batch["label"] <= 0)

    @override
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        good, bad = self._masks(batch)
        return {NUM_EXAMPLES: (good | bad).sum(), "num_desirable": good.sum(), "num_undesirable": bad.sum()}

    @override
    def losses(self, outputs: Likelihoods, lengths: Tensor, batch: Batch) -> Tensor:
        assert outputs.reference is not None, "it needs a reference"
        assert outputs.kl is not None, "it needs the KL divergence"
        ratios = (outputs.log_probs - outputs.reference)[:, 0] - outputs.kl  # [B]
        good, bad = self._weights
        return torch.where(
            batch["label"] > 0,
            good * (1 - torch.sigmoid(self._beta * ratios)),
            bad * (1 - torch.sigmoid(-self._beta * ratios)),
        )

    @override
    def __call__(self, outputs: Likelihoods, batch: Batch) -> list[Term]:
        lengths = count_tokens(batch, num_answers=1)  # [B, 1]
        good, bad = self._masks(batch)
        loss = Term(_sum(self.losses(outputs, lengths, batch), good | bad), per=NUM_EXAMPLES)
        return [loss, *self._measure(outputs, lengths, good, bad)]

    @torch.no_grad()
    def _measure(self, outputs: Likelihoods, lengths: Tensor, good: Tensor, bad: Tensor) -> list[Term]:
        assert outputs.reference is not None
        assert outputs.kl is not None
        of_each = {
            "reward": self._beta * (outputs.log_probs - outputs.reference)[:, 0],
            "log_prob": outputs.log_probs[:, 0],
            "length": lengths[:, 0].float(),
        }
        options: dict[str, Any] = {"weight": 0.0, "in_loss": False}
        found = [Term(outputs.kl * (good | bad).sum(), per=NUM_EXAMPLES, logged_as="kl", **options)]
        for name, value in of_each.items():
            found += [
                Term(_sum(value.detach(), good), per="num_desirable", logged_as=f"chosen_{name}", **options),
                Term(_sum(value.detach(), bad), per="num_undesirable", logged_as=f"rejected_{name}", **options),
            ]
        return found


class BradleyTerry(Loss):
    """Loss of a reward model: -log sigmoid(r_chosen - r_rejected - margin) (arXiv 2203.02155), divided by the pairs.

    Args:
        center_rewards_coefficient: Weight of the squared sum of both rewards, which keeps them around 0 (arXiv
            2312.09244); 0: none. 0.01 in TRL's documentation.
    """

    target_kinds: ClassVar[tuple[str, ...]] = ("pairs",)
    reads: ClassVar[str] = "scores"
    sees_differences_only: ClassVar[bool] = True
    count_names = (NUM_PAIRS,)
    measures: ClassVar[Mapping[str, str]] = {
        "accuracy": "num_pairs",
        "margin": "num_pairs",
        "chosen_reward": "num_pairs",
        "rejected_reward": "num_pairs",
    }
    higher_is_better: ClassVar[tuple[str, ...]] = ("accuracy", "margin")

    def __init__(self, *, center_rewards_coefficient: Annotated[float, ">= 0"]) -> None:
        self._centring = center_rewards_coefficient

    @override
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {NUM_PAIRS: (count_tokens(batch, num_answers=2) > 0).all(dim=1).sum()}

    @override
    def counts_of_sample(self, num_targets: int | None) -> dict[str, int]:
        return {NUM_PAIRS: 1}

    @override
    def complete(self, batch: Batch) -> dict[str, Any]:
        return _complete(batch, num_answers=2)

    @override
    def per_sample(self, outputs: Tensor, batch: Batch) -> Tensor:
        chosen, rejected = outputs.float().unbind(dim=1)
        return -F.logsigmoid(chosen - rejected - batch["margin"])

    @override
    def __call__(self, outputs: Tensor, batch: Batch) -> list[Term]:
        """Return the terms of rewards [B, 2]."""
        carries = (count_tokens(batch, num_answers=2) > 0).all(dim=1)  # [B]
        loss = objective = _sum(self.per_sample(outputs, batch), carries)
        chosen, rejected = outputs.float().unbind(dim=1)
        if self._centring:
            objective = loss + self._centring * _sum((chosen + rejected).square(), carries)
        values = {
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        measured = [
            Term(_sum(value.detach(), carries), per=NUM_PAIRS, weight=0.0, in_loss=False, logged_as=name)
            for name, value in values.items()
        ]
        return [Term(objective, per=NUM_PAIRS, in_loss=loss), *measured]
