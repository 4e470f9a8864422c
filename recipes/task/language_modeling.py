"""Next-token prediction, with a loss per token."""

import functools
import inspect
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.lightning_internals import skip_backward
from recipes.metrics import ValidationMetrics
from recipes.model import LanguageModel
from recipes.numerics.collectives import reduce_parts
from recipes.numerics.head_loss import HeadLoss, cast_weight, split
from recipes.numerics.loss import IGNORE_INDEX, token_losses
from recipes.parallel.schedule import PipelineSchedule
from recipes.parallel.stages import PipelineRanks
from recipes.parallel.tensor import TensorRanks
from recipes.task.base import Batch
from recipes.task.experts import Routing
from recipes.task.generation import GeneratesText
from recipes.task.pipeline import PipelineTask


class LanguageModeling(GeneratesText, PipelineTask):
    """Trains a language model, tokens [B, T] -> logits [B, T, V]. Arguments: see `TrainingTask`.

    Experts and pipeline stages, which few runs have, are in separate files.
    """

    input_kind: ClassVar[str] = "tokens"
    supports: ClassVar[frozenset[str]] = frozenset({"generate", "export", "evaluate_tasks"})

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.trainer.datamodule is None:  # type: ignore[attr-defined]
            return
        self.source = self.trainer.datamodule.source  # type: ignore[attr-defined]
        self.tokenizer = self.source.tokenizer
        if getattr(self.source, "packs", False):
            self._check_positions(self.meta_model())

    def _check_positions(self, model: nn.Module) -> None:
        takes_positions = "positions" in inspect.signature(model.forward).parameters
        if not takes_positions or not getattr(model, "keeps_documents_apart", True):
            title = getattr(model, "title", type(model).__name__)
            why = "was not compared on them" if takes_positions else "takes no positions"
            reason = f"{title} {why}: packed examples would see each other"
            raise ConfigError("data.packing=true", reason, "data.packing=false")

    def _run(self, batch: Batch, **options: Any) -> Any:
        """Return the output of the model for a batch, whose rows may hold several documents."""
        if "positions" in batch:
            options["positions"] = batch["positions"]  # [B, T]
        if self._routing is not None and "num_inputs" in batch and torch.is_grad_enabled():
            options["num_inputs"] = batch["num_inputs"]  # [B]
        forward = self.stage_forward or self.model
        return forward(batch["inputs"], **options)

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self._run(batch)  # [B, T, V], compute dtype
        return self.cross_entropy_sum(logits, batch["targets"]), logits

    @functools.cached_property
    def _head_loss(self) -> HeadLoss | None:
        """Loss computed from chunks of the logits; None: disabled, or not supported by the model."""
        takes_reduce = "reduce" in inspect.signature(self.model.forward).parameters
        if self._loss_chunk_tokens is None or not takes_reduce:
            return None
        if not getattr(self.model, "computes_loss_in_chunks", True):
            return None
        ranks: TensorRanks | None = getattr(getattr(self.model, "head", None), "ranks", None)
        stages: PipelineRanks | None = getattr(self.model, "pipeline", None)
        head_loss = HeadLoss(
            vocab_size=cast(LanguageModel, self.model).vocab_size,
            chunk_tokens=self._loss_chunk_tokens,
            **self._regularizer,
            vocabulary_group=None if ranks is None else ranks.group,
            retains_graph=stages is not None and stages.plan.schedule == "ZBVZeroBubble",
        )
        if self._compile_mode is not None:
            head_loss.compile()
        return head_loss

    @functools.cached_property
    def _routing(self) -> Routing | None:
        """Routing statistics of a model with experts; None: the model has none."""
        return Routing(self) if getattr(self.model, "routes_tokens", False) else None

    @property
    def _pipeline(self) -> PipelineSchedule | None:
        """Pipeline schedule of the stages; None without pipeline parallelism."""
        return self.trainer.strategy.pipeline  # type: ignore[attr-defined, no-any-return]

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._pipeline is not None:
            skip_backward(self.trainer)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch; under pipeline parallelism, of the whole step."""
        if self._routing is not None:
            self._routing.begin_training_step()
        pipeline = self._pipeline
        loss = super().training_step(batch, batch_idx) if pipeline is None else self.run_pipeline(batch, pipeline)
        if self._routing is not None:
            self._routing.end_training_step(batch["num_targets"], loss.device)
        return loss

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self._routing is None:
            super().optimizer_step(*args, **kwargs)
            return
        strategy: Any = self.trainer.strategy
        num_overflows = strategy.num_overflows
        super().optimizer_step(*args, **kwargs)
        self._routing.end_optimizer_step(has_overflowed=strategy.num_overflows != num_overflows)

    @override
    def objective_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        own = self.own_tokens(batch)
        objective, loss = self.own_objective_sum(own)
        return self.add_terms(objective, stage=self.model, targets=own["targets"]), loss

    @override
    def own_tokens(self, batch: Batch) -> Batch:
        ranks = getattr(self.model, "context", None)
        if ranks is None:
            return batch
        return batch | {name: ranks.own_tokens(batch[name], dim=1) for name in ("inputs", "targets")}  # [B, t]

    @override
    def add_terms(self, objective: Tensor, *, stage: nn.Module, targets: Tensor) -> Tensor:
        return objective if self._routing is None else self._routing.add_terms(objective, stage=stage, targets=targets)

    @override
    def own_objective_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self._head_loss is None:
            return super().objective_sum(batch)
        scale = None
        if self.scales_loss and torch.is_grad_enabled():
            unscaled = torch.ones((), device=batch["inputs"].device) * (self._undo_division() / batch["num_targets"])
            scale = self.trainer.strategy.scale_loss(unscaled)  # type: ignore[attr-defined]
        reduce = functools.partial(self._head_loss, targets=batch["targets"], scale=scale)
        objective, loss, by_token = self._run(batch, reduce=reduce)
        if "source" in batch:
            self.add_sources(batch, by_token)
        return objective, loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        batch = self.own_tokens(batch)
        if self._pipeline is not None and not self._pipeline.has_last:
            self._run(batch)  # only ranks with the last stage compute metrics
            return
        if self._head_loss is None:
            super().validation_step(batch, batch_idx, dataloader_idx)
            return
        metrics = self._metrics_of(dataloader_idx)
        measure = functools.partial(self._measure, self._head_loss, targets=batch["targets"], metrics=metrics)
        losses = self._run(batch, reduce=measure)
        if "source" in batch and metrics is self.val_metrics:
            metrics.update_sources(losses, batch["targets"], batch["source"])

    def _measure(
        self, head_loss: HeadLoss, hidden: Tensor, weight: Tensor, *, targets: Tensor, metrics: ValidationMetrics
    ) -> Tensor:
        """Add a batch to validation metrics in chunks of tokens and return the loss of each target, [B, T].

        Args:
            head_loss: Chunked loss of this task.
            hidden: [B, T, W], input of the head.
            weight: [V, W], weight of the head, with padding.
            targets: [B, T].
            metrics: Metrics of the current validation set.
        """
        flat, flat_targets = hidden.flatten(0, -2), targets.flatten()  # [B T, W], [B T]
        weight = cast_weight(weight)
        losses = []
        for part in split(len(flat), head_loss.chunk_tokens):
            logits = head_loss.logits(flat[part], weight)  # [n, V], compute dtype
            losses.append(token_losses(logits, flat_targets[part]))  # [n]
            metrics.update(loss_sum=losses[-1].sum(), logits=logits, targets=flat_targets[part])
        return torch.cat(losses).view_as(targets)

    def recipes_sample_losses(self, batch: Batch) -> Tensor:
        batch = self.own_tokens(batch)
        if self._head_loss is None:
            losses = token_losses(self._run(batch), batch["targets"])  # [B, T]
        else:
            of_tokens = functools.partial(self._head_loss.token_losses, targets=batch["targets"])
            losses = self._run(batch, reduce=of_tokens)
        num_targets = (batch["targets"] != IGNORE_INDEX).sum(dim=1)  # [B]
        of_samples = torch.stack([losses.sum(dim=1), num_targets.to(losses.dtype)])  # [2, B]
        ranks = getattr(self.model, "context", None)
        loss_sums, counts = of_samples if ranks is None else reduce_parts(of_samples, ranks.group)
        means: Tensor = loss_sums / counts
        return means

    def _tokens_per_sample(self, batch: Batch) -> int:
        return int(batch["inputs"].shape[1])
