"""Knowledge distillation (Hinton et al. 2015, arXiv 1503.02531): learn the next token from text and from a teacher."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from recipes.loss import Term
from recipes.numerics.loss import IGNORE_INDEX, token_losses
from recipes.task.base import Batch
from recipes.task.language_modeling import LanguageModeling


class Distillation(LanguageModeling):
    """Trains a language model on the next token and on a frozen teacher's distribution over it.

    The objective of a target is (1 - w) CE + w T^2 KL(teacher || student), where both distributions are softened by
    the temperature T; its square keeps the gradient of the second term from shrinking with T. As everywhere it is
    summed over targets and divided by the targets of the global batch. `train/loss` is the cross-entropy alone, and
    comparable with that of a run without a teacher; `train/divergence` is T^2 KL alone.

    Args:
        teacher_weight: w; 0 is cross-entropy alone, 1 the teacher alone.
        temperature: T; above 1, what the teacher finds unlikely counts for more.
        **settings: Arguments of `TrainingTask`.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"generate", "export", "evaluate_tasks"})
    frozen_sections: ClassVar[tuple[str, ...]] = ("teacher",)
    training_measures: ClassVar[Mapping[str, str]] = {"divergence": "num_targets"}

    def __init__(
        self,
        *,
        teacher_weight: Annotated[float, ">= 0, <= 1"],
        temperature: Annotated[float, "> 0"],
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._teacher_weight = teacher_weight
        self._temperature = temperature
        self._divergence_sum: Callable[..., Tensor] = divergence_sum
        if self._compile_mode is not None:
            self._divergence_sum = torch.compile(divergence_sum)

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and getattr(getattr(self, "source", None), "packs", False):
            self._check_positions(self._frozen["teacher"].on_meta())

    @override
    def own_terms(self, batch: Batch) -> list[Term]:
        """Return the terms of a batch, from the logits of all its tokens at once."""
        wanted = self._teach(batch)
        logits, targets = self.outputs(batch), batch["targets"]
        if "source" in batch:
            self.add_sources(batch, token_losses(self._without_padding(logits).detach(), targets))
        hard = [_scale(term, 1 - self._teacher_weight) for term in self.loss(logits, batch)]
        soft = self._divergence_sum(self._without_padding(logits), wanted, targets, temperature=self._temperature)
        return [*hard, Term(soft, weight=self._teacher_weight, in_loss=False, logged_as="divergence")]

    @torch.no_grad()
    def _teach(self, batch: Batch) -> Tensor:
        """Return the teacher's logits [B, T, V] for a batch, whose rows may hold several documents."""
        options = {"positions": batch["positions"]} if "positions" in batch else {}
        logits: Tensor = self.frozen_models["teacher"](batch["inputs"], **options)
        return self._without_padding(logits)


def _scale(term: Term, factor: float) -> Term:
    """Return a term with another share of the objective, and the same in the logged loss."""
    return term._replace(sum=term.sum * factor, in_loss=term.sum if term.in_loss is True else term.in_loss)


def divergence_sum(logits: Tensor, wanted: Tensor, targets: Tensor, *, temperature: float) -> Tensor:
    """Return T^2 KL(wanted || logits) of softened distributions, summed over targets, 0-dim float32.

    Args:
        logits: [..., V], of the student.
        wanted: [..., V], of the teacher.
        targets: [...]; positions with `IGNORE_INDEX` do not count.
        temperature: T.
    """
    own = torch.log_softmax(logits.float() / temperature, dim=-1)  # [..., V]
    log_wanted = torch.log_softmax(wanted.float() / temperature, dim=-1)  # [..., V]
    of_targets = (log_wanted.exp() * (log_wanted - own)).sum(dim=-1)  # [...]
    return temperature**2 * of_targets.masked_fill(targets == IGNORE_INDEX, 0.0).sum()
