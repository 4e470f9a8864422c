"""Run training steps of a pipeline through torch's schedules.

One step of a schedule is one accumulation window: it runs all forward and backward passes of an optimizer step.
Shapes: B sequences of a micro-batch, t tokens of a rank, W hidden size.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

from recipes.mesh import STAGES_PER_RANK
from recipes.parallel.stages import PipelineRanks, StagedModel

_MAX_SHAPES = 4  # of padded rows: each shape has buffers for the hidden states of all micro-batches


class PipelineSchedule:
    """Computes the gradients of an optimizer step.

    Args:
        model: Stages of this rank.
        num_micro_batches: Micro-batches per step.
        dtype: Dtype of hidden states between stages.

    Attributes:
        has_last: Whether this rank has the last stage, which computes the loss.
    """

    def __init__(self, model: StagedModel, *, num_micro_batches: int, dtype: torch.dtype) -> None:
        self.num_micro_batches = num_micro_batches
        self.has_last = model.pipeline.has_last
        self._model = model
        self._parts: dict[int, Any] = model.parts
        self._ranks: PipelineRanks = model.pipeline
        self._hidden_size = int(model.hidden_size)
        self._dtype = dtype
        self._by_shape: dict[tuple[int, ...], Any] = {}

    def step(
        self,
        tokens: Tensor,
        batch: Mapping[str, Tensor],
        compute: Callable[[Callable[..., Any], Tensor, Mapping[str, Tensor]], Tensor],
        leave: Callable[[nn.Module, Tensor, Mapping[str, Tensor]], Tensor] | None = None,
    ) -> None:
        """Run all forward and backward passes of a step; gradients accumulate.

        Args:
            tokens: [M B, t], tokens of this rank for all M micro-batches.
            batch: Other inputs: `targets` [M B, t], and any tensors with samples as first axis.
            compute: Called on the last stage for each micro-batch, in any order: (forward pass, hidden states [B, t,
                W], rest of the micro-batch) -> objective, [1].
            leave: Called on every other stage for each micro-batch: (stage, its hidden states, rest of the micro-batch)
                -> output for the next stage, [B, t, W].
        """
        schedule = self._get_schedule(tokens.shape)
        for part in self._parts.values():
            part.compute, part.leave = None, leave
        if self.has_last:
            last = self._parts[max(self._parts)]
            last.compute, last.leave = compute, None
        first = [tokens] if 0 in self._parts else []
        target = batch["targets"] if self.has_last else None
        schedule.step(*first, target=target, return_outputs=False, **batch)
        self._add_up_copies()

    def describe(self) -> str:
        """Describe stages, schedule and bubble fraction, assuming that all stages take the same time."""
        plan, number = self._ranks.plan, self.num_micro_batches
        layers = " + ".join(str(count) for _, count in plan.layers)
        waits = f"{idle_fraction(plan.schedule, plan.num_ranks, number):.0%}"
        return f"stages of {layers} layers, {plan.schedule}, {number} micro-batches: each rank waits {waits} of a step"

    def _add_up_copies(self) -> None:
        """Sum the gradients of a tied embedding (first stage) and head (last stage)."""
        if not getattr(self._model, "tie_embeddings", False):
            return
        embedding, head = (getattr(self._model, name, None) for name in ("embedding", "head"))
        self._ranks.add_up(_local_grad(embedding), _local_grad(head))

    def _get_schedule(self, shape: torch.Size) -> Any:
        """Return the schedule for a token shape: torch's stages fix the shapes that they send (2.13)."""
        if tuple(shape) in self._by_shape:
            return self._by_shape[tuple(shape)]
        if len(self._by_shape) >= _MAX_SHAPES:
            del self._by_shape[next(iter(self._by_shape))]  # the same on all ranks of the pipeline
        kind = get_schedule_class(self._ranks.plan.schedule)
        stages = [self._make_stage(stage, part, shape) for stage, part in self._parts.items()]
        made = kind(
            stages[0] if self._ranks.plan.num_stages == self._ranks.plan.num_ranks else stages,
            n_microbatches=self.num_micro_batches,
            # the objective is already normalized by the targets of the whole step
            loss_fn=lambda objective, _: objective.sum(),
            scale_grads=False,
        )
        self._by_shape[tuple(shape)] = made
        return made

    def _make_stage(self, stage: int, part: nn.Module, shape: torch.Size) -> PipelineStage:
        plan = self._ranks.plan
        batch, num_tokens = shape[0] // self.num_micro_batches, shape[1]
        ranks: Any = getattr(part, "ranks", None)
        if ranks is not None:
            num_tokens = num_tokens // ranks.size if ranks.sequence_parallel else num_tokens
        tokens = torch.empty(batch, shape[1], dtype=torch.int64, device="meta")
        size = (batch, num_tokens, self._hidden_size)
        # stages exchange gradients only for tensors that require them
        hidden = torch.empty(size, dtype=self._dtype, device="meta", requires_grad=True)
        objective = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
        return PipelineStage(
            part,
            stage,
            plan.num_stages,
            self._ranks.device,
            input_args=(tokens if stage == 0 else hidden,),
            output_args=(objective if stage == plan.num_stages - 1 else hidden,),
            group=self._ranks.group,
        )


def _local_grad(layer: nn.Module | None) -> Tensor | None:
    if layer is None or not layer.weight.requires_grad:  # frozen, and so is its copy
        return None
    grad = layer.weight.grad
    assert isinstance(grad, DTensor), "every stage is sharded, if over one rank"
    return grad.to_local()


def idle_fraction(schedule: str, num_ranks: int, num_micro_batches: int) -> float:
    """Return the bubble fraction of a step, assuming that all stages take the same time.

    1F1B and interleaved stages: arXiv 2104.04473, equations 1 and 3. The V-shaped zero-bubble schedule (arXiv
    2401.10241) has none from 2 P micro-batches on, if forward, input and weight gradients take the same time.

    Args:
        schedule: Name of the schedule in torch.
        num_ranks: P, pipeline ranks.
        num_micro_batches: M, micro-batches per step.
    """
    waits = float(num_ranks - 1)
    if schedule == "ZBVZeroBubble":
        waits = max(0.0, waits - num_micro_batches / 2)
    else:
        waits /= STAGES_PER_RANK.get(schedule, 1)
    return waits / (num_micro_batches + waits)
