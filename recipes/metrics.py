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
from recipes.loss import Batch, Loss, Term, logged_by_count
from recipes.numerics.loss import sum_by_source

_PREFIX = "val/"
_TO_METRICS = "def to_metrics(self, outputs, batch), returning predictions and targets,"  # of a loss of one's own
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
        """Return the mean over all targets, 0-dim float64, in nats for a cross-entropy."""
        return self.loss_sum / self.num_targets


class Perplexity(MeanLoss):
    """Exponential of the mean loss.

    `torchmetrics.text.Perplexity` 1.9 computes a second softmax, and is inf if a probability underflows in float32.
    """

    @override
    def compute(self) -> Tensor:
        """Return the perplexity over all targets, 0-dim float64."""
        return super().compute().clamp(max=_MAX_LOSS).exp()


class Means(MeanLoss):
    """Means [K] float64, each a sum divided by its own count; NaN where nothing was counted.

    Args:
        num_counts: K.
    """

    def __init__(self, num_counts: int) -> None:
        super().__init__()
        for name in ("loss_sum", "num_targets"):
            self.add_state(name, torch.zeros(num_counts, dtype=torch.float64), dist_reduce_fx="sum")


class SumOfMeans(Means):
    """Loss of several denominators: a sum of means, [] float64."""

    @override
    def update(self, loss_sums: Tensor, counts: Tensor) -> None:
        """Add the sums [K] of a batch, and the counts [K] that divide them."""
        super().update(loss_sums, counts)

    @override
    def compute(self) -> Tensor:
        """Return the sum of the means over the whole split, 0-dim float64."""
        return super().compute().sum()


class ValidationMetrics:
    """Computes `val/loss`, the measures of the loss and named metrics over a validation split, reduced over all ranks.

    Each metric receives the arguments in the signature of its `update`: `preds` and `target`, [N, …], both from the
    loss's `to_metrics`, or `loss_sum` and `num_targets`, those of the loss's first count. Targets without loss,
    including those of padding samples, are dropped: N differs between ranks, and no metric needs an `ignore_index`.

    Deliberately not a submodule of the task: engines would cast its sums to their precision, and wrap and save it.

    Args:
        metrics: Name without `val/` -> metric; logged in this order after the loss.
        loss: What is validated: its counts, measures and predictions.
        split: Name of an additional validation set, logged as `val/<split>/…`; None: the validation split.
        sources: Names of the sources of a mixture, each logged as `val/<name>/loss`.
        group: Process group of ranks with different tokens, over which sums are reduced; None: all ranks.

    Attributes:
        prefix: What the names of its metrics begin with, `val/` or `val/<split>/`.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        *,
        loss: Loss,
        split: str | None = None,
        sources: Sequence[str] = (),
        group: Any = None,
    ) -> None:
        prefix = _PREFIX if split is None else f"{_PREFIX}{split}/"
        own = {"loss": MeanLoss() if len(loss.count_names) == 1 else SumOfMeans(len(loss.count_names))}
        every = {prefix + name: metric for name, metric in {**own, **metrics}.items()}
        self._loss = loss
        self._sources = sources
        self._by_source = Means(len(sources))
        self._measured = Means(len(loss.measures))
        self.prefix = prefix
        self._names = list(every)
        self._reads_outputs = any("preds" in inspect.signature(metric.update).parameters for metric in every.values())
        # compute groups share one state between metrics whose states are equal after the first batch: if that batch is
        # all correct, top-1 and top-5 accuracy would be equal from then on (torchmetrics 1.9)
        self._metrics = MetricCollection(dict(every), compute_groups=False)
        self._device = torch.device("cpu")
        self._group = group

    @property
    def directions(self) -> dict[str, bool | None]:
        """What validation logs -> whether a higher value is better; None: that is not known."""
        of_metrics = {name: self._metrics[name].higher_is_better for name in self._names}
        of_loss = {self.prefix + name: name in self._loss.higher_is_better for name in self._loss.measures}
        return of_metrics | of_loss | {f"{_PREFIX}{name}/loss": False for name in self._sources}

    def reset(self) -> None:
        """Reset all metrics before a validation."""
        for metric in self._every():
            metric.reset()

    def _every(self) -> list[Metric]:
        return [*self._metrics.values(), self._by_source, self._measured]

    @torch.no_grad()
    def update(self, terms: Sequence[Term], *, outputs: Any, batch: Batch) -> None:
        """Add a batch. Synchronizes with the device if any metric needs predictions.

        Args:
            terms: What the loss returned for the batch.
            outputs: What the model returned, [..., V] in any float dtype, without padding columns.
            batch: The batch.
        """
        device = terms[0].sum.device
        if device != self._device:
            self._metrics.to(device)
            self._by_source.to(device)
            self._measured.to(device)
            self._device = device
        counts, sums = self._loss.counts(batch), logged_by_count(terms)
        names = self._loss.count_names
        zero = torch.zeros((), dtype=torch.float64, device=device)
        offered = {"loss_sum": sums.get(names[0], zero), "num_targets": counts[names[0]]}
        if len(names) > 1:  # float64, because counts are whole numbers
            offered |= {
                "loss_sums": torch.stack([sums.get(name, zero).double() for name in names]),  # [K]
                "counts": torch.stack([counts[name].double() for name in names]),  # [K]
            }
        if self._loss.measures:
            self._add_measures(terms, counts)
        if self._reads_outputs:
            preds, target = self._loss.to_metrics(outputs, batch)  # [N, …] each
            if not len(target):
                return  # some metrics reject an empty batch
            offered |= {"preds": preds, "target": target}
        self._metrics.update(**offered)

    def _add_measures(self, terms: Sequence[Term], counts: Mapping[str, Tensor]) -> None:
        of_name = {term.logged_as: term.sum.detach() for term in terms if term.logged_as is not None}
        zero = torch.zeros((), device=self._device)
        measures = self._loss.measures
        sums = torch.stack([of_name.get(name, zero).double() for name in measures])  # [K]
        divisors = torch.stack([counts[per].double() for per in measures.values()])  # [K]
        self._measured.update(sums, divisors.to(sums.device))

    def try_outputs(self, outputs: Tensor, batch: Batch) -> None:
        """Try the metrics on outputs of the model, so that what does not fit is found before the first step.

        Raises:
            ConfigError: The loss makes no predictions of them, or a metric rejects those.
        """
        if not self._reads_outputs:
            return
        try:
            preds, target = self._loss.to_metrics(outputs, batch)  # [N, …] each
        except Exception as error:  # it may be one's own
            reason = f"its to_metrics() fails on what the model returns, {_first_line(error)}"
            fix = f"metrics=none, or {_TO_METRICS} in that class"
            raise ConfigError(f"loss._target_={_get_path(self._loss)}", reason, fix) from error
        offered = {"preds": preds, "target": target}
        for name, metric in self._metrics.items(keep_base=True):
            if "preds" in inspect.signature(metric.update).parameters and len(target):
                key = f"metrics.{name.removeprefix(self.prefix)}"
                try:
                    metric.clone().update(**metric._filter_kwargs(**offered))
                except Exception as error:  # metrics raise many types for unsuitable input
                    reason = f"it rejects predictions {[*preds.shape]} and targets {[*target.shape]} of the data"
                    shown = f"{key}._target_={type(metric).__name__}"
                    raise ConfigError(shown, f"{reason}: {_first_line(error)}", f"'~{key}'") from error

    def update_sources(self, losses: Tensor, targets: Tensor, sources: Tensor) -> None:
        """Add the loss of each target [B, T], by the source of its sample [B]."""
        self._by_source.update(*sum_by_source(losses, targets, sources, num_sources=len(self._sources)))

    def compute(self) -> dict[str, float]:
        """Return `val/loss` and the metrics over all batches and ranks; collective, call on every rank."""
        for metric in self._every():
            metric.process_group = self._group  # not set earlier: a metric with a process group cannot be copied
        with warnings.catch_warnings():
            if self._group is not None:  # pipeline ranks without the last stage never call `update`
                warnings.filterwarnings("ignore", message="The ``compute`` method of metric .* was called before")
            values = self._metrics.compute()
            # reshaped: torchmetrics 1.9 squeezes the values [K] of a single source to 0-dim
            by_source = self._by_source.compute().reshape(-1).tolist() if self._sources else []
            measured = self._measured.compute().reshape(-1).tolist() if self._loss.measures else []
        found = {name: float(values[name]) for name in self._names}
        found |= {self.prefix + name: value for name, value in zip(self._loss.measures, measured, strict=True)}
        if self._sources:
            losses = zip(self._sources, by_source, strict=True)
            found |= {f"val/{name}/loss": loss for name, loss in losses if not math.isnan(loss)}
        for metric in self._every():
            metric.process_group = None
        return found


def check_metric(name: str, metric: object, *, loss: Loss, num_outputs: int | None, target_kind: str) -> None:
    """Try a metric on two samples, so that an unsuitable one fails before anything is loaded.

    Args:
        name: Key in the config section `metrics`.
        metric: Object instantiated from the node.
        loss: Loss whose predictions it gets.
        num_outputs: V; None: no setting of the model says, and the model's own first outputs are tried later.
        target_kind: Kind of the targets of the data.

    Raises:
        ConfigError: `metric` is not a `torchmetrics.Metric`, rejects the predictions, or returns several values; or it
            reads predictions, and the loss makes none.
    """
    kind = type(metric).__name__
    if not isinstance(metric, Metric):
        raise ConfigError(
            f"metrics.{name}._target_={kind}",
            "it is not a torchmetrics.Metric",
            f"metrics.{name}._target_=<a class of torchmetrics.classification>",
        )
    reads_outputs = "preds" in inspect.signature(metric.update).parameters
    if reads_outputs and not loss.offers_predictions:
        reason = f"metrics.{name} compares predictions with targets, and it has no to_metrics(), which returns them"
        fix = f"metrics=none, or {_TO_METRICS} in that class"
        raise ConfigError(f"loss._target_={_get_path(loss)}", reason, fix)
    example = None if num_outputs is None else loss.example(num_outputs, target_kind)
    if example is None:
        return
    tried = metric.clone()
    tried.distributed_available_fn = lambda: False  # no collectives: this test is local to the rank
    collection = MetricCollection({name: tried}, compute_groups=False)
    preds, target = loss.to_metrics(example.outputs, {"targets": example.targets})
    offered = {"preds": preds, "target": target, "loss_sum": torch.tensor(1.0), "num_targets": torch.tensor(2)}
    try:
        collection.update(**offered)
        value = tried.compute()
    except Exception as error:  # metrics raise many types for unsuitable input
        raise ConfigError(
            f"metrics.{name}._target_={kind}",
            f"it rejects {example.offered}: {_first_line(error)}",
            f"metrics.{name}._target_=<{example.fitting}>, or '~metrics.{name}'",
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigError(
            f"metrics.{name}._target_={kind}",
            "it returns several values, but val/… holds one",
            f"metrics.{name}.average=macro, or '~metrics.{name}'",
        )


def _get_path(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
