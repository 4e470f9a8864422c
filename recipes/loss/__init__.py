"""Losses, one file per option of conf/loss, and what they return: sums, each with the count that divides it.

The loss of a step is a sum over the global batch divided by a count over the global batch. A mean of the means of
micro-batches or ranks weights them equally, however many targets each has; so a loss never divides. It returns sums
(`Term`), and says what it counts in a batch (`counts`). The data stream adds the counts over the micro-batches of the
step and over the data-parallel ranks before the first forward pass; the task divides.

Shapes: B samples, V classes or outputs.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from recipes.errors import ConfigError
from recipes.numerics.head_loss import HeadLoss
from recipes.numerics.loss import IGNORE_INDEX, widen

Batch = Mapping[str, Any]
NUM_TARGETS = "num_targets"


class Term(NamedTuple):
    """A summand of the training objective: `weight * sum / count`, with the count of the global batch.

    Attributes:
        sum: Sum over the micro-batch, 0-dim; differentiable.
        per: Name of the count that divides it, one of the loss's `count_names`.
        weight: Factor in the objective. With 0, the term is measured and not trained on.
        in_loss: Whether it is part of the logged loss, `train/loss` and `val/loss`; a tensor, 0-dim, is logged in the
            place of `sum`, as for a sum that also holds a regularizer.
        logged_as: Name under which it is logged on its own, without weight, as `train/<name>` and `val/<name>`, or as
            it is if it has a prefix of its own; one of the loss's `measures`.
    """

    sum: Tensor
    per: str = NUM_TARGETS
    weight: float = 1.0
    in_loss: bool | Tensor = True
    logged_as: str | None = None


MULTICLASS = "a Multiclass… of torchmetrics.classification"
MULTILABEL = "a Multilabel… of torchmetrics.classification"
_THRESHOLD = 0.5  # of a probability, above which a label is predicted, as in torchmetrics
NO_PREDICTIONS = "neither its predicts nor its target_kinds, with one kind alone, says what the outputs are"
SAY_PREDICTIONS = 'predicts = "classes" in that class where they are logits of classes, or def to_predictions(…)'
# kind of targets -> what the outputs of a loss that reads this kind alone are taken for
_PREDICTED_FOR = {"classes": "classes", "probabilities": "classes", "labels": "labels", "values": "values"}


class Example(NamedTuple):
    """Outputs and targets of two samples.

    Attributes:
        outputs: [2, V].
        targets: [2, …].
        offered: What metrics get of them, in words.
        fitting: Which metrics take that, in words.
    """

    outputs: Tensor
    targets: Tensor
    offered: str
    fitting: str


class Loss(ABC):
    """A loss as sums and counts, both of which can be added over micro-batches and ranks.

    To write one: name the counts in `count_names`, return them from `counts`, and return terms. Without padding of its
    own, a batch for validation may have samples that carry no loss (targets of `IGNORE_INDEX`, or NaN): they must enter
    no sum and no count.

    Attributes:
        target_kinds: Kinds of targets that it reads: `classes`, `labels`, `values`, or any other word that a data
            option has as its `target_kind`; a plain literal, which the config check reads from the source. Empty: any.
        predicts: What metrics and `mode=predict` take the outputs for: `classes`, which are logits [B, …, V]; `labels`,
            logits [B, V]; or `values`, in the shape of the targets. None: the only one of `target_kinds`; where there
            are several or none, nothing is known of the outputs. Override `to_metrics` and `to_predictions` where they
            are something else, such as logarithms.
        count_names: Names of the counts, all of which `counts` returns.
        measures: What the loss logs beside itself: names of terms with `logged_as` -> the count that divides each; a
            plain literal, so that `checkpoint.monitor=val/<name>` is checked before the run starts.
        higher_is_better: Those of the measures of which a higher value is better; a plain literal.
        is_validated: Whether a validation computes it; a plain literal. One of completions needs their rewards.
        sees_differences_only: Whether it compares scores, so that a bias which shifts all of them has no gradient.
        num_outputs: V without padding; outputs beyond it are padding. Set by the task once it has a model; None: no
            output is padding.
        target_kind: Kind of the targets of the data; None: not known. Set where the run is built.
    """

    target_kinds: ClassVar[tuple[str, ...]] = ()
    predicts: ClassVar[str | None] = None
    count_names: Sequence[str] = (NUM_TARGETS,)
    measures: ClassVar[Mapping[str, str]] = {}
    higher_is_better: ClassVar[tuple[str, ...]] = ()
    is_validated: ClassVar[bool] = True
    sees_differences_only: ClassVar[bool] = False
    num_outputs: int | None = None
    target_kind: str | None = None

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """Return the counts of a micro-batch, 0-dim int64 or float64; called on the host, before the forward pass."""

    def counts_of_sample(self, num_targets: int | None) -> dict[str, int] | None:
        """Return the counts of one sample if they are the same for every sample; None if they vary.

        With equal counts nothing is read ahead and nothing is summed over ranks.

        Args:
            num_targets: Targets in each sample of the data; None if the number varies.
        """
        return None

    @abstractmethod
    def __call__(self, outputs: Any, batch: Batch) -> list[Term]:
        """Return the terms of a micro-batch.

        Args:
            outputs: What the task's model returned.
            batch: The micro-batch on the device; with `batch[name]`, the counts of the global batch, in training.
        """

    @abstractmethod
    def per_sample(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean loss of each sample over its targets, [B] float32, without regularizers."""

    def complete(self, batch: Batch) -> dict[str, Any]:
        """Return a batch of one row per sample with all that the loss reads, for a plan, which has no data."""
        return dict(batch)

    def compile(self) -> None:  # noqa: B027 - not every loss has a part that is worth it
        """Compile the elementwise part with torch.compile; called before the first batch of a compiled run."""

    def in_chunks(
        self, vocab_size: int, *, vocabulary_group: ProcessGroup | None, retains_graph: bool
    ) -> HeadLoss | None:
        """Return this loss as a function of the input of a language model's head, computed chunk by chunk.

        Args:
            vocab_size: V without padding.
            vocabulary_group: Process group over which the head is sharded; None: it is not.
            retains_graph: Whether the backward pass runs twice.

        Returns:
            None: the loss needs all logits of a micro-batch at once.
        """
        return None

    def has_loss(self, targets: Tensor) -> Tensor:
        """Return which targets carry loss: whole numbers but `IGNORE_INDEX`, floating-point numbers but NaN."""
        return ~targets.isnan() if targets.is_floating_point() else targets != IGNORE_INDEX

    @property
    def predicted(self) -> str | None:
        """What the outputs are taken for, one of `classes`, `labels` and `values`; None: nobody has said it."""
        kinds = [self.predicts] if self.predicts is not None else [*self.target_kinds]
        kind = kinds[0] if len(kinds) == 1 else None
        return _PREDICTED_FOR.get(kind) if kind is not None else None

    @property
    def offers_predictions(self) -> bool:
        """Whether it is known what the outputs are, or `to_metrics` is written."""
        return self.predicted is not None or type(self).to_metrics is not Loss.to_metrics

    def to_metrics(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the predictions and targets that torchmetrics read, without padding.

        Args:
            outputs: What the task's model returned, without padding columns.
            batch: The batch.

        Returns:
            Logits [N, V] and classes [N], probabilities [N, V] and labels [N, V], or values [N, …] and [N, …]: of N
            targets, or samples all of whose numbers are known.
        """
        targets = batch["targets"]
        if self.predicted == "classes":
            _check_logits(outputs, batch)
            carries = self.has_loss(targets)
            if carries.ndim == outputs.ndim:  # of each probability
                carries = carries.all(dim=-1)  # [B, …]
            logits = outputs.flatten(0, -2)  # [N, V]
            classes = (targets.argmax(dim=-1) if targets.is_floating_point() else targets).flatten()  # [N]
            if not carries.all():  # avoid a copy otherwise
                logits, classes = logits[carries.flatten()], classes[carries.flatten()]
            return _recognizable(logits) if len(logits) else logits, classes
        assert self.predicted is not None, "a loss without it is used with metrics=none, which the check says"
        predicted = match(widen(outputs), targets)
        carries = self.has_loss(targets).reshape(len(targets), -1).all(dim=1)  # [B]
        if self.predicted == "labels":
            return predicted[carries].sigmoid(), targets[carries].round().long()
        return predicted[carries], targets[carries].to(predicted.dtype)

    def to_predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return what `mode=predict` writes of each sample beside its target and loss, by column, [B, …].

        The most probable `class` and the `probabilities`, the `labels`, 0 or 1, and theirs, or the `values`; the
        `outputs` where these have another shape; nothing where nobody says what they are.

        Args:
            outputs: What the task's model returned, without padding columns.
            batch: The batch; targets that are not known carry no loss.
        """
        targets = batch["targets"]
        if self.predicted is None:
            return {}
        if self.predicted == "classes":
            if not _are_logits(outputs, targets):
                return {"outputs": widen(outputs)}
            probabilities = widen(outputs).softmax(dim=-1)
            return {"class": probabilities.argmax(dim=-1), "probabilities": probabilities}
        if outputs.shape not in (targets.shape, (*targets.shape, 1)):
            return {"outputs": widen(outputs)}
        values = widen(outputs).view(targets.shape)
        return {"values": values} if self.predicted == "values" else describe_labels(values.sigmoid())

    def example(self, num_outputs: int, kind: str) -> Example | None:
        """Return two samples, on which metrics are tried before anything is loaded; None: there are none.

        Args:
            num_outputs: V.
            kind: Kind of the targets, one of `target_kinds`.
        """
        if self.predicted == "classes":
            classes = torch.tensor([0, num_outputs - 1])  # [2]
            targets = F.one_hot(classes, num_outputs).float() if kind == "probabilities" else classes
            offered = f"logits [N, {num_outputs}] and classes [N]"
            return Example(torch.eye(2, num_outputs), targets, offered, MULTICLASS)
        if self.predicted == "labels":
            offered = f"probabilities [N, {num_outputs}] and labels [N, {num_outputs}]"
            return Example(torch.eye(2, num_outputs), torch.eye(2, num_outputs), offered, MULTILABEL)
        if self.predicted == "values":
            targets = torch.arange(2 * num_outputs, dtype=torch.float32).view(2, num_outputs)  # [2, V]
            offered = f"numbers [N, {num_outputs}] and numbers [N, {num_outputs}]"
            return Example(targets + 1, targets, offered, "a metric of torchmetrics.regression")
        return None


class TargetLoss(Loss):
    """A loss of each target by itself, divided by the number of targets.

    A subclass returns the losses of single targets; sums, counts and means of samples follow.
    """

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each target, in the shape of `has_loss(targets)`, 0 where there is none; float32.

        Args:
            outputs: [B, …] in any float dtype, with padding columns.
            targets: [B, …].
        """

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {NUM_TARGETS: self.has_loss(batch["targets"]).sum()}

    def counts_of_sample(self, num_targets: int | None) -> dict[str, int] | None:
        return None if num_targets is None else {NUM_TARGETS: num_targets}

    def __call__(self, outputs: Tensor, batch: Batch) -> list[Term]:
        return [Term(self._losses_of_targets(outputs, batch["targets"]).sum())]

    def _losses_of_targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses, one of each target: outputs [B, 1] less targets [B] would be [B, B], and train.

        Raises:
            ConfigError: A subclass returns another number of losses.
        """
        losses, shape = self.losses(outputs, targets), self.has_loss(targets).shape
        if losses.numel() != shape.numel():
            found = f"losses() returns {list(losses.shape)} for {list(shape)} targets"
            raise ConfigError(
                f"loss._target_={type(self).__name__}",
                f"{found} and outputs {list(outputs.shape)}: it must return the loss of each target",
                "outputs.squeeze(-1) in losses() if these have an axis of 1, and no mean",
            )
        return losses

    def per_sample(self, outputs: Tensor, batch: Batch) -> Tensor:
        losses = self._losses_of_targets(outputs, batch["targets"])
        carries = self.has_loss(batch["targets"])
        return losses.reshape(len(losses), -1).sum(dim=1) / carries.reshape(len(losses), -1).sum(dim=1)  # [B]


def match(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs in the shape of the targets: [B, 1] becomes [B], which would else broadcast to [B, B].

    Raises:
        ValueError: The shapes differ otherwise.
    """
    if outputs.shape == (*targets.shape, 1):
        return outputs.squeeze(-1)
    if outputs.shape != targets.shape:
        shapes = f"outputs {list(outputs.shape)} and targets {list(targets.shape)}"
        raise ValueError(
            f"{shapes}: a loss of numbers needs one output per number; set model.num_classes to their number"
        )
    return outputs


def describe_labels(probabilities: Tensor) -> dict[str, Tensor]:
    """Return the columns of `mode=predict` for labels, of their probabilities [B, V]."""
    return {"labels": (probabilities > _THRESHOLD).long(), "probabilities": probabilities}


def _are_logits(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether outputs [B, …, V] are of two classes or more for each target: an index, or probabilities."""
    of_targets = targets.shape[:-1] if targets.is_floating_point() else targets.shape
    return outputs.shape[:-1] == of_targets and outputs.shape[-1] > 1


def _check_logits(outputs: Tensor, batch: Batch) -> None:
    targets = batch["targets"]
    if not _are_logits(outputs, targets):
        shapes = f"outputs {list(outputs.shape)} and targets {list(targets.shape)}"
        raise ValueError(f"{shapes}: a loss of classes needs one output per class")


def _recognizable(logits: Tensor) -> Tensor:
    """Shift logits [N, V] that all lie in [0, 1], which torchmetrics would treat as probabilities.

    A zero-initialized head produces such logits. A constant shift changes neither softmax nor ranking.
    """
    first = logits[0]  # [V]; a single value outside [0, 1] suffices
    return logits.float() - 2.0 if ((first >= 0) & (first <= 1)).all() else logits


def sum_by_count(terms: Sequence[Term]) -> dict[str, Tensor]:
    """Return the differentiable part of the objective, summed by the count that divides it."""
    sums: dict[str, Tensor] = {}
    for term in terms:
        if term.weight:
            part = term.sum if term.weight == 1.0 else term.sum * term.weight
            sums[term.per] = sums[term.per] + part if term.per in sums else part
    return sums


def logged_by_count(terms: Sequence[Term]) -> dict[str, Tensor]:
    """Return what the logged loss consists of, summed by the count that divides it, without gradients."""
    sums: dict[str, Tensor] = {}
    for term in terms:
        if term.weight and term.in_loss is not False:
            part = (term.sum if term.in_loss is True else term.in_loss).detach()
            part = part if term.weight == 1.0 else part * term.weight
            sums[term.per] = sums[term.per] + part if term.per in sums else part
    return sums


def get_count(batch: Batch, name: str, divided: Tensor) -> Any:
    """Return a count of a global batch: a host integer, or a tensor of the dtype of the sum that it divides.

    A whole number divided by a tensor of whole numbers has the default dtype, which is bfloat16 under bf16-true.
    """
    count = batch[name]
    return count.to(divided.dtype) if isinstance(count, Tensor) else count


def divide(sums: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Return sums by the name of their count, each divided by that count in a batch, and added, 0-dim."""
    parts: list[Tensor] = [part / get_count(batch, per, part) for per, part in sums.items()]
    return functools.reduce(torch.Tensor.add, parts)


def get_mean(loss: Loss, outputs: Any, batch: Batch) -> Tensor:
    """Return the logged loss of a batch divided by its own counts, 0-dim, without gradients."""
    counts = {name: count.clamp(min=1) for name, count in loss.counts(batch).items()}
    return divide(logged_by_count(loss(outputs, batch)), counts)


def detach(term: Term) -> Term:
    """Return a term without gradients, which keeps no graph in memory."""
    in_loss = term.in_loss.detach() if isinstance(term.in_loss, Tensor) else term.in_loss
    return term._replace(sum=term.sum.detach(), in_loss=in_loss)


def add_up(terms: Sequence[Term], zero: Tensor) -> list[Term]:
    """Return the terms of several micro-batches, without gradients, as those of one; a collected sum begins at `zero`.

    Args:
        terms: From `detach`.
        zero: 0-dim float32 on the device.
    """
    alike: dict[tuple[Any, ...], list[Term]] = {}
    for term in terms:
        in_loss = term.in_loss if isinstance(term.in_loss, bool) else None
        alike.setdefault((term.per, term.weight, term.logged_as, in_loss), []).append(term)
    return [
        group[0]._replace(
            sum=torch.stack([zero, *(term.sum for term in group)]).sum(),
            in_loss=torch.stack([zero, *(torch.as_tensor(term.in_loss) for term in group)]).sum()
            if isinstance(group[0].in_loss, Tensor)
            else group[0].in_loss,
        )
        for group in alike.values()
    ]
