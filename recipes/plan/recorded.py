"""Record the step of a config: the operators of one rank with their sections."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from recipes.config.resolved import ResolvedRun
from recipes.numerics.accumulation import Accumulation
from recipes.plan.activations import keep_budget
from recipes.plan.config_step import Engine, describe_step, divide_ranks, find_engine, find_sample_shape
from recipes.plan.hardware import Cluster
from recipes.plan.step import Step, record_step
from recipes.plan.trace import Op
from recipes.plan.unroll import block_kinds, record_unrolled
from recipes.precision import Precision


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Recorded step of a config.

    Attributes:
        model: Unsharded, on the meta device.
        engine: Behavior of the strategy.
        accumulation: Global batch and micro-batches.
        shape: Shape of one sample.
        step: Step that was recorded.
        kinds: Kind of each block.
        ops: Operators of one rank.
        reason: Why the forward pass could not be recorded; None: it was recorded.
    """

    model: nn.Module
    engine: Engine
    accumulation: Accumulation
    shape: tuple[int, ...]
    step: Step
    kinds: Sequence[object]
    ops: list[Op]
    reason: str | None

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the unsharded model."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def record_config(
    resolved: ResolvedRun, cluster: Cluster, *, keep_calls: bool = False, computes: bool = True
) -> Recorded:
    """Record the step of a run.

    Args:
        resolved: Checked run.
        cluster: The devices.
        keep_calls: Keep the arguments of each operator.
        computes: Whether to record the forward and backward pass; else only clipping and the optimizer.

    Raises:
        ConfigError: The ranks do not divide the global batch, or the mesh sizes do not divide the ranks.
    """
    precision: Precision = resolved.make("precision")
    with torch.device("meta"):
        model: nn.Module = resolved.make_model()
    pipeline, stage = divide_ranks(resolved, cluster)
    engine, accumulation = find_engine(stage, pipeline, precision, cluster, model=model), stage.accumulation
    shape = find_sample_shape(resolved) if computes else ()
    step = describe_step(resolved, precision, accumulation, engine, shape, on_gpu=cluster.device.full_name is not None)
    kinds = block_kinds(model, recomputes=step.activation_checkpoint.recomputes)
    ops, reason = _record(step, kinds, keep_calls=keep_calls, computes=computes)
    return Recorded(
        model=model,
        engine=engine,
        accumulation=accumulation,
        shape=shape,
        step=step,
        kinds=kinds,
        ops=ops,
        reason=reason,
    )


def _record(step: Step, kinds: Sequence[object], *, keep_calls: bool, computes: bool) -> tuple[list[Op], str | None]:
    """Return the operators of a step, and the reason if those of the forward pass are missing."""
    try:
        if (
            step.mesh.tensor > 1 and kinds and computes
        ):  # DTensor derives placements once, with operators outside the step
            record_step(step, blocks=[0])
        ops = record_unrolled(
            lambda blocks: record_step(step, blocks=blocks, keep_calls=keep_calls, computes=computes), kinds
        )
    except (RuntimeError, NotImplementedError) as error:  # raised by fake tensors where a value is read
        reason = " ".join(str(error).split()) or type(error).__name__
        return record_step(step, computes=False), reason
    budget = step.activation_checkpoint.memory_budget
    return ops if budget is None else keep_budget(ops, budget), None
