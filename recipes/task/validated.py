"""Validation shared by all tasks: loss and metrics per validation set and per source of a mixture."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as lightning
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from recipes.metrics import ValidationMetrics
from recipes.numerics.collectives import average_over_ranks
from recipes.numerics.loss import token_losses
from recipes.optimizer import hold_averages
from recipes.parallel.groups import Groups

Batch = dict[str, Any]


class Validated(lightning.LightningModule):
    """A task that computes metrics over one or more validation sets, reduced over all ranks.

    Args:
        metrics: Validation metrics in addition to `val/loss`, by name without `val/`.
        **settings: Arguments of the next base class.

    Attributes:
        val_metrics: Metrics of the validation split; those of additional sets are in `eval_metrics`.
        source_names: Sources of a mixture, whose losses are logged separately; set before the first step.
    """

    model: nn.Module

    def __init__(self, *, metrics: Mapping[str, Metric], **settings: Any) -> None:
        super().__init__(**settings)
        self._metrics = metrics
        self.name_data(sources=(), further=())

    def name_data(self, *, sources: Sequence[str], further: Sequence[str], group: Any = None) -> None:
        """Set the names of a mixture's sources and of the additional validation sets.

        Args:
            sources: Names of the sources.
            further: Names of the additional validation sets.
            group: Process group of ranks with different tokens; None: all ranks.
        """
        self.source_names = sources
        self.val_metrics = ValidationMetrics(self._metrics, sources=sources, group=group)
        self.eval_metrics = [
            ValidationMetrics({key: metric.clone() for key, metric in self._metrics.items()}, split=name, group=group)
            for name in further
        ]

    @override
    def setup(self, stage: str) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if data is not None:
            further = getattr(data, "eval_names", ())  # a user-defined data module has none
            groups: Groups = self.trainer.strategy.groups  # type: ignore[attr-defined]
            sources = getattr(data.source, "source_names", ())
            self.name_data(sources=sources, further=further, group=groups.tokens)

    @abstractmethod
    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of a micro-batch summed over targets, 0-dim float32, and the logits [..., V]."""

    def _without_padding(self, logits: Tensor) -> Tensor:
        """Return a view of logits [..., V] without vocabulary padding."""
        return logits[..., : getattr(self.model, "vocab_size", None)]

    @override
    def on_validation_epoch_start(self) -> None:
        for metrics in (self.val_metrics, *self.eval_metrics):
            metrics.reset()
        self.share_statistics()
        hold_averages(self.trainer.optimizers, self.model, held=True)

    def share_statistics(self) -> None:
        """Average running statistics over ranks, because each rank has updated them with its own samples."""
        saved = self.state_dict(keep_vars=True)  # excludes constant tables, which are not persistent
        buffers = (buffer for name, buffer in self.named_buffers() if name in saved)
        groups: Groups = self.trainer.strategy.groups  # type: ignore[attr-defined]
        average_over_ranks((buffer for buffer in buffers if buffer.is_floating_point()), groups.stage)

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        metrics = self._metrics_of(dataloader_idx)
        loss_sum, logits = self.loss_sum(batch)
        logits = self._without_padding(logits)
        metrics.update(loss_sum=loss_sum, logits=logits, targets=batch["targets"])
        if "source" in batch and metrics is self.val_metrics:
            metrics.update_sources(token_losses(logits, batch["targets"]), batch["targets"], batch["source"])

    def _metrics_of(self, dataloader_idx: int) -> ValidationMetrics:
        return self.eval_metrics[dataloader_idx - 1] if dataloader_idx else self.val_metrics

    @override
    def on_validation_epoch_end(self) -> None:
        hold_averages(self.trainer.optimizers, self.model, held=False)
        for metrics in (self.val_metrics, *self.eval_metrics):
            self.log_dict(metrics.compute())
