"""Training step under pipeline parallelism: all micro-batches of an optimizer step in one schedule."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recipes.parallel.schedule import PipelineSchedule
from recipes.parallel.stages import list_stages
from recipes.task.base import Batch, TrainingTask


class PipelineTask(TrainingTask, ABC):
    """A task on token sequences whose model may be a `StagedModel`.

    Attributes:
        stage_forward: Forward pass of the last pipeline stage, set while it computes the loss; None: the model's.
    """

    stage_forward: Callable[..., Any] | None = None

    @abstractmethod
    def own_tokens(self, batch: Batch) -> Batch:
        """Return a batch with this rank's shard of every sequence; `positions` still cover all tokens."""

    @abstractmethod
    def own_objective_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return objective and loss of a batch from `own_tokens`, summed over targets, without auxiliary losses."""

    @abstractmethod
    def add_terms(self, objective: Tensor, *, stage: nn.Module, targets: Tensor) -> Tensor:
        """Return the objective of a micro-batch plus the auxiliary losses of a stage's layers.

        Args:
            objective: Summed over targets, 0-dim.
            stage: Stage that computed the micro-batch; the whole model without pipeline parallelism.
            targets: [B, T].
        """

    def run_pipeline(self, batch: Batch, pipeline: PipelineSchedule) -> Tensor:
        """Compute the gradients of a whole step and return its loss; 0 on ranks without the last stage."""
        self.trainer.optimizers[0].zero_grad()
        num_targets = batch["num_targets"]
        own = self.own_tokens(batch)
        losses: list[Tensor] = []
        # explicitly float32: bf16-true changes the default dtype
        zero = torch.zeros((), dtype=torch.float32, device=own["inputs"].device)

        def scale(objective_sum: Tensor) -> Tensor:
            scaled = objective_sum * (self._undo_division() / num_targets)
            return self.trainer.strategy.scale_loss(scaled)  # type: ignore[attr-defined, no-any-return]

        def compute(forward: Callable[..., Any], hidden: Tensor, rest: Mapping[str, Tensor]) -> Tensor:
            self.stage_forward = forward
            try:
                micro_batch = {**rest, "inputs": hidden, "num_targets": num_targets}
                objective_sum, loss_sum = self.own_objective_sum(micro_batch)
            finally:
                self.stage_forward = None
            losses.append(loss_sum.detach())
            last = list_stages(self.model)[-1]
            objective_sum = self.add_terms(objective_sum, stage=last, targets=rest["targets"])
            return torch.stack([scale(objective_sum)])  # not a view, which FSDP2 warns about

        def leave(stage: nn.Module, hidden: Tensor, rest: Mapping[str, Tensor]) -> Tensor:
            terms = self.add_terms(zero, stage=stage, targets=rest["targets"])
            if terms.requires_grad:
                hidden = _Differentiate.apply(hidden, scale(terms))  # type: ignore[no-untyped-call]
            return hidden

        # on every rank: a loss scaler has no scale before its first call, and ranks without the loss unscale too
        scale(zero)
        names = [name for name in ("targets", "positions", "num_inputs", "source") if name in own]
        pipeline.step(own["inputs"], {name: own[name] for name in names}, compute, leave)
        self._count(batch)
        # zero on ranks without the last stage, because losses are summed over pipeline ranks too
        loss_sum = torch.stack([zero, *losses]).sum()
        if "source" in own and not pipeline.has_last:
            self.add_sources(own, torch.zeros_like(own["targets"], dtype=torch.float32), counts=False)
        self._add_loss(loss_sum, batch)
        step_loss: Tensor = loss_sum / num_targets
        return step_loss


class _Differentiate(torch.autograd.Function):
    """Identity on hidden states whose backward pass also starts backpropagation of a scalar term of the objective.

    A stage receives only the gradient of the hidden states that it sends; its own auxiliary losses need this path.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, terms: Tensor) -> Tensor:
        ctx.terms = terms.dtype, terms.device
        return torch.ops.aten._unsafe_view(hidden, hidden.shape)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.terms
        return grad, torch.ones((), dtype=dtype, device=device)
