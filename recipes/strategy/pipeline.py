"""The gradients of a step where ranks divide the layers, for a strategy and a task."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.parallel.schedule import PipelineSchedule, idle_fraction
from recipes.parallel.stages import StagedModel


class Pipeline:
    """Computes the gradients of a step.

    Args:
        model: The stages of this rank.
        num_micro_batches: Of a step.
        dtype: Of hidden states between stages.

    Attributes:
        has_last: Whether this rank has the last stage, which computes the loss.
    """

    def __init__(self, model: StagedModel, *, num_micro_batches: int, dtype: torch.dtype) -> None:
        self._model = model
        self._schedule = PipelineSchedule(model, num_micro_batches=num_micro_batches, dtype=dtype)
        self.has_last = model.pipeline.has_last

    def step(
        self,
        tokens: Tensor,
        batch: Mapping[str, Tensor],
        compute: Callable[[Callable[..., Any], Tensor, Mapping[str, Tensor]], Tensor],
        leave: Callable[[nn.Module, Tensor, Mapping[str, Tensor]], Tensor],
    ) -> None:
        """Run all forward and backward passes of a step. Arguments: see `PipelineSchedule.step`."""
        self._schedule.step(tokens, batch, compute, leave)
        self._add_up_copies()

    def describe(self) -> str:
        """Return stages, schedule, and the share of a step in which a rank waits if all stages took the same time."""
        plan, number = self._model.pipeline.plan, self._schedule.num_micro_batches
        layers = " + ".join(str(count) for _, count in plan.layers)
        waits = f"{idle_fraction(plan.schedule, plan.num_ranks, number):.0%}"
        return f"stages of {layers} layers, {plan.schedule}, {number} micro-batches: each rank waits {waits} of a step"

    def _add_up_copies(self) -> None:
        """Give a tied embedding and head, of the first and the last stage, the gradient of both."""
        if not getattr(self._model, "tie_embeddings", False):
            return
        embedding, head = (getattr(self._model, name, None) for name in ("embedding", "head"))
        self._model.pipeline.add_up(_local_grad(embedding), _local_grad(head))


def _local_grad(layer: nn.Module | None) -> Tensor | None:
    if layer is None:
        return None
    grad = layer.weight.grad
    assert isinstance(grad, DTensor), "every stage is sharded, if over one rank"
    return grad.to_local()
