"""Record the step of a config: the operators of one rank with their sections."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recipes.blocks import list_blocks
from recipes.build import build_task
from recipes.config.resolved import ResolvedRun
from recipes.data import prepare_with
from recipes.errors import ConfigError
from recipes.loss import Loss, divide, sum_by_count
from recipes.mesh import Mesh
from recipes.model.flops import flops_per_weight
from recipes.numerics.accumulation import Accumulation
from recipes.plan.activations import keep_budget
from recipes.plan.hardware import Cluster
from recipes.plan.memory import Zero
from recipes.plan.pipeline import Pipeline, read_pipeline
from recipes.plan.step import Batch, Sharding, Step, record_step
from recipes.plan.trace import Op
from recipes.plan.unroll import block_kinds, record_unrolled
from recipes.precision import Precision
from recipes.runtime.world import Ranks
from recipes.strategy.deepspeed.partition import ALIGNMENT, BUCKET_ELEMENTS, list_cast_weights

# Derive a step to record, and the strategy's effect on it, from a config.


@dataclass(frozen=True, kw_only=True)
class StrategyEffect:
    """Effect of a config's strategy on a step.

    Attributes:
        mesh: Mesh of the run, or of one pipeline stage.
        pipeline: Pipeline stages.
        sharding: FSDP2 sharding; None under other strategies.
        zero: DeepSpeed partitioning; None under other strategies.
        offloads: Whether the optimizer steps in host memory.
    """

    mesh: Mesh
    pipeline: Pipeline = field(default_factory=Pipeline)
    sharding: Sharding | None = None
    zero: Zero | None = None
    offloads: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the run."""
        return self.mesh.world_size * self.pipeline.num_stages


def find_strategy_effect(
    stage: ResolvedRun, pipeline: Pipeline, precision: Precision, cluster: Cluster, *, model: nn.Module
) -> StrategyEffect:
    """Return the effect of a run's strategy on a cluster.

    Args:
        stage: The run on the ranks of one pipeline stage.
        pipeline: Its pipeline.
        precision: Precision of the run.
        cluster: The devices.
        model: Unsharded model, on any device.

    Raises:
        ConfigError: The sizes of the mesh do not divide the ranks.
    """
    mesh, traits = stage.mesh, stage.strategy
    if traits.state_layout == "fsdp":
        sharding = Sharding(
            cpu_offload=traits.cpu_offload,
            syncs_each_micro_batch=traits.gradient_sync == "per_micro_batch" and pipeline.num_stages == 1,
            reshard_after_forward=traits.reshard_after_forward,
            reduce_dtype=torch.bfloat16 if traits.reduce_dtype == "bfloat16" else precision.reduce_dtype,
        )
        return StrategyEffect(mesh=mesh, pipeline=pipeline, sharding=sharding, offloads=traits.cpu_offload)
    if traits.stage is not None:
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        cast = list_cast_weights(list_blocks(model)) if traits.stage == 3 and precision.is_mixed else ()
        bucket = max(min(BUCKET_ELEMENTS, num_parameters // 8) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
        zero = Zero(
            stage=traits.stage,
            num_ranks=mesh.world_size,
            bucket=bucket,
            num_buckets=2 if cluster.device.full_name is not None else 1,
            offloads_optimizer=traits.offload_optimizer is not None,
            offloads_weights=traits.offload_parameters is not None,
            is_half=not precision.is_mixed and precision.param_dtype != torch.float32,
            num_cast=sum(weight.numel() for weight in cast),
        )
        return StrategyEffect(mesh=mesh, zero=zero, offloads=zero.offloads_optimizer)
    return StrategyEffect(mesh=mesh)


def divide_ranks(resolved: ResolvedRun, cluster: Cluster) -> tuple[Pipeline, ResolvedRun]:
    """Return the pipeline of a run, and the run on the ranks of one stage, whose mesh may raise a ConfigError.

    Raises:
        ConfigError: The stages do not divide the ranks or the blocks.
    """
    pipeline, traits = read_pipeline(resolved), resolved.strategy
    world_size = cluster.num_devices if traits.needs_process_group else 1
    stages = pipeline.num_stages
    if stages > 1 and traits.state_layout != "fsdp":
        raise ConfigError(
            f"pipeline_parallel_size={stages} {traits.typed}",
            "a plan splits layers into stages under strategy=fsdp and hsdp only",
            "strategy=fsdp, or pipeline_parallel_size=1",
        )
    if world_size % stages:
        raise ConfigError(
            f"pipeline_parallel_size={stages}",
            f"{world_size} ranks are not divisible by {stages} stages",
            f"pipeline_parallel_size={math.gcd(world_size, stages)}",
        )
    per_node = math.gcd(cluster.per_node, world_size // stages)  # stages are the outermost dimension
    ranks = Ranks(per_node=per_node, num_nodes=world_size // stages // per_node, started_by=None)
    return pipeline, resolved.with_settings({"pipeline_parallel_size": 1}).on(ranks)


def describe_step(
    resolved: ResolvedRun,
    precision: Precision,
    accumulation: Accumulation,
    engine: StrategyEffect,
    shape: tuple[int, ...],
    *,
    on_gpu: bool,
) -> Step:
    """Return everything that a step of a run depends on.

    Args:
        resolved: The run.
        precision: Precision of the run.
        accumulation: Global batch and micro-batches.
        engine: Effect of its strategy.
        shape: Shape of one sample.
        on_gpu: Whether to record GPU operators.
    """
    loss: Loss = resolved.make("loss")
    settings: dict[str, Any] = {"metrics": {}, "compile": False}
    if resolved.config["task"].get("channels_last", False) is None:
        settings["task.channels_last"] = on_gpu  # tensors without storage are on no GPU
    task = build_task(resolved.with_settings(settings), precision, loss)
    task.scales_loss = False  # the loss scale is a scalar of the run's strategy

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        vars(task).pop("_head_loss", None)  # it caches the ranks of the first model
        task.model = model
        return divide(sum_by_count(task.terms(batch)), batch)

    return Step(
        make_model=resolved.make_model,
        objective=objective,
        make_batch=partial(_make_batch, resolved, loss, accumulation.micro_batch_size, shape, precision),
        make_optimizer=resolved.make_optimizer(),
        precision=precision,
        activation_checkpoint=resolved.make("activation_checkpoint"),
        accumulates=accumulation.num_micro_batches > 1,
        frees_gradients=resolved.strategy.frees_gradients,
        engine_steps=engine.zero is not None,
        drops_gradients=engine.zero is not None and engine.zero.stage > 1,
        ema_decay=resolved.ema_decay,
        mesh=engine.mesh,
        sharding=engine.sharding,
        num_replicas=engine.mesh.world_size if engine.sharding is None and engine.zero is None else 1,
        on_gpu=on_gpu,
        is_compiled=resolved.compile_mode_on(gpu=on_gpu) is not None,
        frozen_models=task.make_frozen_models,
        hold_frozen=task.frozen_models.update,
        forward_only=task.meta_frozen_models,
        num_forward_passes=task.num_forward_passes,
    )


def find_sample_shape(resolved: ResolvedRun) -> tuple[int, ...]:
    """Return the shape of a sample: [T] of text, [C, S, S] of captioned images, without reading data; else as it is."""
    if resolved.task.input_kind == "images_and_text":
        with torch.device("meta"):
            model = resolved.make_model()
        return (model.in_channels, model.image_size, model.image_size)
    if resolved.seq_len is not None:
        return (resolved.seq_len,)
    source = resolved.make("data")
    prepare_with(source, None)
    return tuple(source.train()[0]["inputs"].shape)


def _make_batch(resolved: ResolvedRun, loss: Loss, size: int, shape: tuple[int, ...], precision: Precision) -> Batch:
    if "tokens" in resolved.task.input_kinds:
        inputs = torch.zeros(size, *shape, dtype=torch.int64)  # [B, T]
        targets = torch.zeros_like(inputs)
    else:
        inputs = torch.zeros(size, *shape, dtype=precision.param_dtype)  # [B, C, H, W]
        targets = torch.zeros(size, dtype=torch.int64)  # [B]
        if resolved.target_kind != "classes":
            targets = torch.zeros(size, resolved.model.num_classes or 1)  # [B, V]
    further: Batch = {}
    if resolved.task.input_kind == "images_and_text":
        tokens = torch.zeros(size, resolved.seq_len or 1, dtype=torch.int64)  # [B, T]
        further = {"tokens": tokens, "is_token": torch.ones_like(tokens, dtype=torch.bool)}
    elif resolved.images_per_row:
        number, channels, side = size * resolved.images_per_row, *_find_image_shape(resolved)
        images = torch.zeros(number, channels, side, side, dtype=precision.param_dtype)  # [N, C, S, S]
        further = {"images": images, "num_images": torch.full((size,), resolved.images_per_row)}
    return loss.complete(
        {"inputs": inputs, "targets": targets, **further, **dict.fromkeys(loss.count_names, targets.numel())}
    )


def _find_image_shape(resolved: ResolvedRun) -> tuple[int, int]:
    """Return the channels of an image that the model reads, and its pixels a side."""
    settings = resolved.config["model"]
    return int(settings["in_channels"]), int(settings["image_size"])


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Recorded step of a config.

    Attributes:
        model: Unsharded, on the meta device.
        forward_only: Models beside it whose forward pass alone is in a step, likewise.
        rows_per_sample: Rows that a sample has in a batch, such as the two answers of a pair.
        images_per_row: Images among the tokens of a row.
        engine: Behavior of the strategy.
        accumulation: Global batch and micro-batches.
        shape: Shape of one sample.
        step: Step that was recorded.
        kinds: Kind of each block.
        ops: Operators of one rank.
        reason: Why the forward pass could not be recorded; None: it was recorded.
    """

    model: nn.Module
    forward_only: Sequence[nn.Module]
    rows_per_sample: int
    images_per_row: int
    engine: StrategyEffect
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

    @property
    def num_trained(self) -> int:
        """Number of those that are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @property
    def num_forward_only(self) -> int:
        """Number of those in frozen blocks before everything that is trained, which have no backward pass."""
        return sum(weight.numel() for weight, flops in flops_per_weight(self.model).items() if flops == 2.0)


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
    engine, accumulation = find_strategy_effect(stage, pipeline, precision, cluster, model=model), stage.accumulation
    shape = find_sample_shape(resolved) if computes else ()
    step = describe_step(resolved, precision, accumulation, engine, shape, on_gpu=cluster.device.full_name is not None)
    with torch.device("meta"):
        num_rows = len(step.make_batch()["inputs"]) if computes else accumulation.micro_batch_size
    kinds = block_kinds(model, recomputes=step.activation_checkpoint.recomputes)
    ops, reason = _record(step, kinds, keep_calls=keep_calls, computes=computes)
    return Recorded(
        model=model,
        forward_only=step.forward_only(),
        rows_per_sample=num_rows // accumulation.micro_batch_size,
        images_per_row=resolved.images_per_row,
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
