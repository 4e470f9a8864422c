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
        logged_as: Name under which it is logged on its own, without weight, as `train/<name>` and `val/<name>`; one of
            the loss's `measures`.
    """

    sum: Tensor
    per: str = NUM_TARGETS
    weight: float = 1.0
    in_loss: bool | Tensor = True
    logged_as: str | None = None


MULTICLASS = "a Multiclass… of torchmetrics.classification"


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
        count_names: Names of the counts, all of which `counts` returns.
        measures: What the loss logs beside itself: names of terms with `logged_as` -> the count that divides each; a
            plain literal, so that `checkpoint.monitor=val/<name>` is checked before the run starts.
        higher_is_better: Those of the measures of which a higher value is better; a plain literal.
        num_outputs: V without padding; outputs beyond it are padding. Set by the task once it has a model; None: no
            output is padding.
    """

    target_kinds: ClassVar[tuple[str, ...]] = ()
    count_names: Sequence[str] = (NUM_TARGETS,)
    measures: ClassVar[Mapping[str, str]] = {}
    higher_is_better: ClassVar[tuple[str, ...]] = ()
    num_outputs: int | None = None

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

    def to_metrics(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the predictions and targets that torchmetrics read, without padding.

        Args:
            outputs: What the task's model returned, without padding columns.
            batch: The batch.

        Returns:
            [N, …] and [N, …], N predictions that carry loss.
        """
        raise NotImplementedError("a loss without it is used with metrics=none, which the check before the run says")

    @property
    def offers_predictions(self) -> bool:
        """Whether `to_metrics` is written."""
        return type(self).to_metrics is not Loss.to_metrics

    def to_predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return what `mode=predict` writes of each sample beside its target and loss, by column, [B, …].

        Args:
            outputs: What the task's model returned, without padding columns.
            batch: The batch.
        """
        return {}

    def example(self, num_outputs: int, kind: str) -> Example | None:
        """Return two samples, on which metrics are tried before anything is loaded; None: there are none.

        Args:
            num_outputs: V.
            kind: Kind of the targets, one of `target_kinds`.
        """
        return None


class TargetLoss(Loss):
    """A loss of each target by itself, divided by the number of targets.

    A subclass returns the losses of single targets; sums, counts and means of samples follow. Of a loss that reads
    `values` and nothing else, metrics and `mode=predict` take the outputs for the predicted values: override
    `to_metrics` and `to_predictions` where they are something else, such as logarithms.
    """

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each target, in the shape of `has_loss(targets)`, 0 where there is none; float32.

        Args:
            outputs: [B, …] in any float dtype, with padding columns.
            targets: [B, …].
        """

    def has_loss(self, targets: Tensor) -> Tensor:
        """Return which targets carry loss: whole numbers but `IGNORE_INDEX`, floating-point numbers but NaN."""
        return ~targets.isnan() if targets.is_floating_point() else targets != IGNORE_INDEX

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

    @property
    def _predicts_values(self) -> bool:
        return tuple(self.target_kinds) == ("values",)

    @property
    def offers_predictions(self) -> bool:
        return self._predicts_values or type(self).to_metrics is not TargetLoss.to_metrics

    def to_metrics(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of the samples of which all numbers are known, [N, V] or [N]."""
        if not self._predicts_values:
            return super().to_metrics(outputs, batch)
        targets = batch["targets"]
        predicted = match(widen(outputs), targets)
        carries = self.has_loss(targets).reshape(len(targets), -1).all(dim=1)  # [B]
        return predicted[carries], targets[carries].to(predicted.dtype)

    def to_predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the `values` in the shape of the targets; the `outputs` if they have another one."""
        if not self._predicts_values:
            return super().to_predictions(outputs, batch)
        shape = batch["targets"].shape
        if outputs.shape not in (shape, (*shape, 1)):
            return {"outputs": widen(outputs)}
        return {"values": widen(outputs).view(shape)}

    def example(self, num_outputs: int, kind: str) -> Example | None:
        if not self._predicts_values:
            return super().example(num_outputs, kind)
        targets = torch.arange(2 * num_outputs, dtype=torch.float32).view(2, num_outputs)  # [2, V]
        offered = f"numbers [N, {num_outputs}] and numbers [N, {num_outputs}]"
        return Example(targets + 1, targets, offered, "a metric of torchmetrics.regression")


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
