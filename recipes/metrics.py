"""Validation metrics: torchmetrics classes that sum over batches and ranks; `val/loss` is one of them.

Letters: N samples or tokens that carry loss, V classes or tokens of the vocabulary.
"""

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.numerics.loss import IGNORE_INDEX, sum_by_source

_PREFIX = "val/"
_MAX_LOSS = 700.0  # e^710 overflows a float64; a loss that large means a broken model


class MeanLoss(Metric):
    """Loss summed over targets, divided by the targets: exact however they are split into batches and ranks."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    loss_sum: Tensor
    num_targets: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("loss_sum", "num_targets"):
            # float64: sums over a large validation split stay exact enough to add in any order
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, loss_sum: Tensor, num_targets: Tensor) -> None:
        """Add a batch: its loss summed over its targets, and their number, both 0-dim."""
        self.loss_sum += loss_sum
        self.num_targets += num_targets

    @override
    def compute(self) -> Tensor:
        """Return the mean over all targets, 0-dim float64, in nats."""
        return self.loss_sum / self.num_targets


class Perplexity(MeanLoss):
    """Exponential of the mean loss.

    `torchmetrics.text.Perplexity` 1.9 computes a second softmax, and is inf where one probability underflows float32.
    """

    @override
    def compute(self) -> Tensor:
        """Return the perplexity over all targets, 0-dim float64."""
        return super().compute().clamp(max=_MAX_LOSS).exp()


class SourceLosses(MeanLoss):
    """Mean loss over the targets of each source of a mixture, [K] float64; NaN without a target.

    Args:
        num_sources: K.
    """

    def __init__(self, num_sources: int) -> None:
        super().__init__()
        for name in ("loss_sum", "num_targets"):
            self.add_state(name, torch.zeros(num_sources, dtype=torch.float64), dist_reduce_fx="sum")


class ValidationMetrics:
    """Computes `val/loss` and named metrics over a validation split, all ranks together.

    Each metric receives those arguments that its `update` names: `preds`, logits [N, V], and `target`, classes [N],
    or `loss_sum` and `num_targets`. Targets without loss are left out, those of padding samples among them: N differs
    between ranks, and no metric needs an `ignore_index`.

    Deliberately no module of the task: engines would cast its sums to their precision, and wrap and save it.

    Args:
        metrics: Name without `val/` -> metric; logged in this order after the loss.
        split: Name of a further validation, whose metrics are `val/<split>/…`; None: the validation split.
        sources: Names of the sources of a mixture, each of which has `val/<name>/loss`.
        group: Process group of ranks that have other tokens, whose sums are added; None: all ranks.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        *,
        split: str | None = None,
        sources: Sequence[str] = (),
        group: Any = None,
    ) -> None:
        prefix = _PREFIX if split is None else f"{_PREFIX}{split}/"
        every = {prefix + name: metric for name, metric in {"loss": MeanLoss(), **metrics}.items()}
        self._sources = sources
        self._by_source = SourceLosses(len(sources))
        self._names = list(every)
        self._reads_logits = any("preds" in inspect.signature(metric.update).parameters for metric in every.values())
        # compute groups share one state between metrics whose states are equal after the first batch: top-1 and top-5
        # accuracy are, where all of it is right, and would stay the same number from then on (torchmetrics 1.9)
        self._metrics = MetricCollection(dict(every), compute_groups=False)
        self._device = torch.device("cpu")
        self._group = group

    def reset(self) -> None:
        """Begin a validation."""
        self._metrics.reset()
        self._by_source.reset()

    @torch.no_grad()
    def update(self, *, loss_sum: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Add a batch. Waits for the device, if any metric reads logits.

        Args:
            loss_sum: Loss summed over the targets, 0-dim.
            logits: [..., V] in any float dtype, without columns that pad the vocabulary.
            targets: [...] classes or tokens; `IGNORE_INDEX` carries no loss.
        """
        if logits.device != self._device:
            self._metrics.to(logits.device)
            self._by_source.to(logits.device)
            self._device = logits.device
        carries_loss = targets.flatten() != IGNORE_INDEX  # [all]
        offered = {"loss_sum": loss_sum, "num_targets": carries_loss.sum()}
        if self._reads_logits:
            preds, target = logits.flatten(0, -2), targets.flatten()  # [all, V], [all]
            if not carries_loss.all():  # else spare the copy
                preds, target = preds[carries_loss], target[carries_loss]  # [N, V], [N]
            if not len(target):
                return  # adds nothing, and not every metric accepts no sample
            offered |= {"preds": _recognizable(preds), "target": target}
        self._metrics.update(**offered)

    def update_sources(self, losses: Tensor, targets: Tensor, sources: Tensor) -> None:
        """Add the loss of each target [B, T] of samples of several sources [B]."""
        self._by_source.update(*sum_by_source(losses, targets, sources, num_sources=len(self._sources)))

    def compute(self) -> dict[str, float]:
        """Return `val/loss` and the metrics over all batches and ranks; called on every rank."""
        for metric in (*self._metrics.values(), self._by_source):
            metric.process_group = self._group  # here and not before: a metric with one cannot be copied
        with warnings.catch_warnings():
            if self._group is not None:  # of a pipeline, the ranks of other stages than the last update nothing
                warnings.filterwarnings("ignore", message="The ``compute`` method of metric .* was called before")
            values = self._metrics.compute()
            by_source = self._by_source.compute().tolist() if self._sources else []
        found = {name: float(values[name]) for name in self._names}
        if self._sources:
            losses = zip(self._sources, by_source, strict=True)
            found |= {f"val/{name}/loss": loss for name, loss in losses if not math.isnan(loss)}
        for metric in (*self._metrics.values(), self._by_source):
            metric.process_group = None
        return found


def _recognizable(logits: Tensor) -> Tensor:
    """Return logits [N, V] that torchmetrics takes for logits: it takes values in [0, 1] for probabilities.

    A model whose head starts at zero has such logits. Softmax and order do not change if all are shifted.
    """
    first = logits[0]  # [V]; a single value outside suffices
    return logits.float() - 2.0 if ((first >= 0) & (first <= 1)).all() else logits


def check_metric(name: str, metric: object, *, num_classes: int) -> None:
    """Try a metric on two samples, so that a misfit ends the run before its first step and not at its first validation.

    Args:
        name: Key of the config section `metrics`.
        metric: What its node makes.
        num_classes: V.

    Raises:
        ConfigError: It is no metric, does not accept logits and classes, or does not give one number.
    """
    kind = type(metric).__name__
    if not isinstance(metric, Metric):
        raise ConfigError(
            f"metrics.{name}._target_={kind}",
            "it makes no torchmetrics.Metric",
            f"metrics.{name}._target_=<a class of torchmetrics.classification>",
        )
    tried = metric.clone()
    tried.distributed_available_fn = lambda: False  # a trial of this rank alone
    collection = MetricCollection({name: tried}, compute_groups=False)
    offered = {
        "preds": torch.eye(2, num_classes),  # [2, V]
        "target": torch.tensor([0, num_classes - 1]),  # [2]
        "loss_sum": torch.tensor(1.0),
        "num_targets": torch.tensor(2),
    }
    try:
        collection.update(**offered)
        value = tried.compute()
    except Exception as error:  # whatever a metric raises for input of another kind
        raise ConfigError(
            f"metrics.{name}._target_={kind}",
            f"it rejects logits [N, {num_classes}] and classes [N]: {str(error).partition(chr(10))[0]}",
            f"metrics.{name}._target_=<a Multiclass… of torchmetrics.classification>, or '~metrics.{name}'",
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigError(
            f"metrics.{name}._target_={kind}",
            "it gives more than one number, and val/… is a column",
            f"metrics.{name}.average=macro, or '~metrics.{name}'",
        )
