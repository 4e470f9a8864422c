"""Validation metrics: torchmetrics classes that sum over batches and ranks; `val/loss` is one of them.

Shapes: N samples or tokens with a loss, V classes or vocabulary size.
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
    """Summed loss divided by the number of targets: exact for any split into batches and ranks."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    loss_sum: Tensor
    num_targets: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("loss_sum", "num_targets"):
            # float64: over a large validation split, rounding does not make the sum depend on the order
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, loss_sum: Tensor, num_targets: Tensor) -> None:
        """Add the summed loss of a batch and its number of targets, both 0-dim."""
        self.loss_sum += loss_sum
        self.num_targets += num_targets

    @override
    def compute(self) -> Tensor:
        """Return the mean over all targets, 0-dim float64, in nats."""
        return self.loss_sum / self.num_targets


class Perplexity(MeanLoss):
    """Exponential of the mean loss.

    `torchmetrics.text.Perplexity` 1.9 computes a second softmax, and is inf if a probability underflows in float32.
    """

    @override
    def compute(self) -> Tensor:
        """Return the perplexity over all targets, 0-dim float64."""
        return super().compute().clamp(max=_MAX_LOSS).exp()


class SourceLosses(MeanLoss):
    """Mean loss over the targets of each source of a mixture, [K] float64; NaN for a source without targets.

    Args:
        num_sources: Number of sources, K.
    """

    def __init__(self, num_sources: int) -> None:
        super().__init__()
        for name in ("loss_sum", "num_targets"):
            self.add_state(name, torch.zeros(num_sources, dtype=torch.float64), dist_reduce_fx="sum")


class ValidationMetrics:
    """Computes `val/loss` and named metrics over a validation split, reduced over all ranks.

    Each metric receives the arguments in the signature of its `update`: `preds`, logits [N, V], and `target`, classes
    [N], or `loss_sum` and `num_targets`. Ignored targets, including those of padding samples, are dropped: N differs
    between ranks, and no metric needs an `ignore_index`.

    Deliberately not a submodule of the task: engines would cast its sums to their precision, and wrap and save it.

    Args:
        metrics: Name without `val/` -> metric; logged in this order after the loss.
        split: Name of an additional validation set, logged as `val/<split>/…`; None: the validation split.
        sources: Names of the sources of a mixture, each logged as `val/<name>/loss`.
        group: Process group of ranks with different tokens, over which sums are reduced; None: all ranks.
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
        # compute groups share one state between metrics whose states are equal after the first batch: if that batch is
        # all correct, top-1 and top-5 accuracy would be equal from then on (torchmetrics 1.9)
        self._metrics = MetricCollection(dict(every), compute_groups=False)
        self._device = torch.device("cpu")
        self._group = group

    def reset(self) -> None:
        """Reset all metrics before a validation."""
        self._metrics.reset()
        self._by_source.reset()

    @torch.no_grad()
    def update(self, *, loss_sum: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Add a batch. Synchronizes with the device if any metric needs logits.

        Args:
            loss_sum: Loss summed over the targets, 0-dim.
            logits: [..., V] in any float dtype, without vocabulary padding.
            targets: [...] classes or tokens; `IGNORE_INDEX` has no loss.
        """
        if logits.device != self._device:
            self._metrics.to(logits.device)
            self._by_source.to(logits.device)
            self._device = logits.device
        carries_loss = targets.flatten() != IGNORE_INDEX  # [all]
        offered = {"loss_sum": loss_sum, "num_targets": carries_loss.sum()}
        if self._reads_logits:
            preds, target = logits.flatten(0, -2), targets.flatten()  # [all, V], [all]
            if not carries_loss.all():  # avoid a copy otherwise
                preds, target = preds[carries_loss], target[carries_loss]  # [N, V], [N]
            if not len(target):
                return  # some metrics reject an empty batch
            offered |= {"preds": _recognizable(preds), "target": target}
        self._metrics.update(**offered)

    def update_sources(self, losses: Tensor, targets: Tensor, sources: Tensor) -> None:
        """Add the loss of each target [B, T], by the source of its sample [B]."""
        self._by_source.update(*sum_by_source(losses, targets, sources, num_sources=len(self._sources)))

    def compute(self) -> dict[str, float]:
        """Return `val/loss` and the metrics over all batches and ranks; collective, call on every rank."""
        for metric in (*self._metrics.values(), self._by_source):
            metric.process_group = self._group  # not set earlier: a metric with a process group cannot be copied
        with warnings.catch_warnings():
            if self._group is not None:  # pipeline ranks without the last stage never call `update`
                warnings.filterwarnings("ignore", message="The ``compute`` method of metric .* was called before")
            values = self._metrics.compute()
            # reshaped: torchmetrics 1.9 squeezes the values [K] of a single source to 0-dim
            by_source = self._by_source.compute().reshape(-1).tolist() if self._sources else []
        found = {name: float(values[name]) for name in self._names}
        if self._sources:
            losses = zip(self._sources, by_source, strict=True)
            found |= {f"val/{name}/loss": loss for name, loss in losses if not math.isnan(loss)}
        for metric in (*self._metrics.values(), self._by_source):
            metric.process_group = None
        return found


def _recognizable(logits: Tensor) -> Tensor:
    """Shift logits [N, V] that all lie in [0, 1], which torchmetrics would treat as probabilities.

    A zero-initialized head produces such logits. A constant shift changes neither softmax nor ranking.
    """
    first = logits[0]  # [V]; a single value outside [0, 1] suffices
    return logits.float() - 2.0 if ((first >= 0) & (first <= 1)).all() else logits


def check_metric(name: str, metric: object, *, num_classes: int) -> None:
    """Try a metric on two samples, so that an unsuitable one fails before the first step.

    Args:
        name: Key in the config section `metrics`.
        metric: Object instantiated from the node.
        num_classes: V.

    Raises:
        ConfigError: `metric` is not a `torchmetrics.Metric`, rejects logits and classes, or returns several values.
    """
    kind = type(metric).__name__
    if not isinstance(metric, Metric):
        raise ConfigError(
            f"metrics.{name}._target_={kind}",
            "it is not a torchmetrics.Metric",
            f"metrics.{name}._target_=<a class of torchmetrics.classification>",
        )
    tried = metric.clone()
    tried.distributed_available_fn = lambda: False  # no collectives: this test is local to the rank
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
    except Exception as error:  # metrics raise many types for unsuitable input
        raise ConfigError(
            f"metrics.{name}._target_={kind}",
            f"it rejects logits [N, {num_classes}] and classes [N]: {str(error).partition(chr(10))[0]}",
            f"metrics.{name}._target_=<a Multiclass… of torchmetrics.classification>, or '~metrics.{name}'",
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigError(
            f"metrics.{name}._target_={kind}",
            "it returns several values, but val/… holds one",
            f"metrics.{name}.average=macro, or '~metrics.{name}'",
        )
