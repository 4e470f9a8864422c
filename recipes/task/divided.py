"""A task whose ranks divide sequences or layers: which part of a batch is theirs, and a whole step in stages."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from recipes.strategy.pipeline import Pipeline
from recipes.task.base import Batch, TrainingTask


class DividedTask(TrainingTask, ABC):
    """For tasks of sequences of tokens.

    Attributes:
        stage_forward: Forward pass of the last stage of a pipeline, while it computes the loss; None: the model's.
    """

    stage_forward: Callable[..., Any] | None = None

    def own_tokens(self, batch: Batch) -> Batch:
        """Return a batch with this rank's part of every sequence; positions stay those of all tokens."""
        ranks = getattr(self.model, "context", None)
        if ranks is None:
            return batch
        return batch | {name: ranks.own_tokens(batch[name], dim=1) for name in ("inputs", "targets")}  # [B, t]

    @abstractmethod
    def own_objective_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return objective and plain loss, summed over targets, of a batch that `own_tokens` has returned."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        pipeline: Pipeline | None = self.trainer.strategy.pipeline  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx) if pipeline is None else self._run_stages(batch, pipeline)

    @override
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.trainer.strategy.pipeline is None:  # type: ignore[attr-defined]
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)
        # else Lightning is late: it calls this after the training step, which has run the backward passes

    def _run_stages(self, batch: Batch, pipeline: Pipeline) -> Tensor:
        """Compute the gradients of a whole step, and return its loss; 0 where other ranks compute it."""
        self.trainer.optimizers[0].zero_grad()
        num_targets = batch["num_targets"]
        own = self.own_tokens(batch)
        losses: list[Tensor] = []
        # in float32, whatever the default dtype is: bf16-true has another
        zero = torch.zeros((), dtype=torch.float32, device=own["inputs"].device)

        def compute(forward: Callable[..., Any], hidden: Tensor, rest: Mapping[str, Tensor]) -> Tensor:
            self.stage_forward = forward
            try:
                micro_batch = {**rest, "inputs": hidden, "num_targets": num_targets}
                objective_sum, loss_sum = self.own_objective_sum(micro_batch)
            finally:
                self.stage_forward = None
            losses.append(loss_sum.detach())
            scaled = objective_sum * (self._undo_division() / num_targets)
            scaled = self.trainer.strategy.scale_loss(scaled)  # type: ignore[attr-defined]
            return torch.stack([scaled])  # no view, which FSDP2 warns of

        # on every rank: a loss scaler has no scale before its first call, and ranks without the loss unscale, too
        self.trainer.strategy.scale_loss(zero)  # type: ignore[attr-defined]
        names = [name for name in ("targets", "positions", "source") if name in own]
        pipeline.step(own["inputs"], {name: own[name] for name in names}, compute)
        self._count(batch)
        # zeros where other ranks have the last stage: losses are summed over the ranks of a pipeline, too
        loss_sum = torch.stack([zero, *losses]).sum()
        if "source" in own and not pipeline.has_last:
            self.add_sources(own, torch.zeros_like(own["targets"], dtype=torch.float32), counts=False)
        self._add_loss(loss_sum, batch)
        step_loss: Tensor = loss_sum / num_targets
        return step_loss
