"""Search for the fastest meshes for a run on a cluster: dimension sizes, micro-batch size and recomputation.

A few recordings of two ranks yield the places of the model, from which thousands of layouts are estimated in seconds
(`recipes.plan.estimate`). The fastest can then be recorded and planned like any other run.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from recipes.config.ranks import MODEL_SIZES
from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError
from recipes.mesh import Mesh, least_micro_batches
from recipes.model.flops import flops_per_sample
from recipes.plan.advice import with_overrides
from recipes.plan.estimate import Estimate, Estimator, Layout, Recordings, Shape
from recipes.plan.hardware import Cluster
from recipes.plan.pipeline import Pipeline
from recipes.plan.places import Places, describe_places, with_seconds
from recipes.plan.plan import size_unit
from recipes.plan.recorded import Recorded, record_config
from recipes.plan.roofline import Rates, time_step
from recipes.plan.trace import GRADIENTS, OPTIMIZER, WEIGHTS

_RECOMPUTE = ("none", "selective", "full")
_MOST_MICRO_BATCH, _MOST_CONTEXT, _MOST_STAGES = 64, 64, 64
_AT_MOST = 10  # rows shown


@dataclass(frozen=True, kw_only=True)
class Found:
    """Layout found by the search.

    Attributes:
        recompute: Option of `activation_checkpoint`.
        estimate: Its memory and time.
        mfu: Model FLOPs utilization, counted as in PaLM; None: unknown for this model.
    """

    recompute: str
    estimate: Estimate
    mfu: float | None

    def overrides(self) -> list[str]:
        """Return the overrides that select this layout."""
        layout = self.estimate.layout
        mesh = layout.mesh
        sizes = {"tensor_parallel_size": mesh.tensor, "context_parallel_size": mesh.context}
        sizes |= {"pipeline_parallel_size": layout.pipeline.num_stages}
        return [
            "strategy=fsdp",
            *(f"{name}={size}" for name, size in sizes.items() if size > 1),
            f"data_parallel_shard={mesh.shard}",
            *([f"data_parallel_replicate={mesh.replicate}"] if mesh.replicate > 1 else []),
            f"micro_batch_size={layout.micro_batch_size}",
            f"activation_checkpoint={self.recompute}",
        ]


def search_layouts(
    resolved: ResolvedRun, cluster: Cluster, rates: Rates, *, limit_bytes: float, peak_tflops: float
) -> tuple[list[Found], Found]:
    """Return the layouts that fit, fastest first, and the layout with the lowest memory.

    Among layouts that differ only in shards and micro-batch size, the fastest is kept.

    Args:
        resolved: The run; its global batch size is kept.
        cluster: The devices.
        rates: Rates of a device.
        limit_bytes: Usable memory of a device.
        peak_tflops: Peak of a device in the run's arithmetic.

    Raises:
        ConfigError: Expert parallelism is on, no step can be recorded, or no layout divides the devices and the batch.
    """
    batch = resolved.global_batch_size
    if resolved.expert_parallel_size > 1:
        raise ConfigError(
            f"plan.search=true expert_parallel_size={resolved.expert_parallel_size}",
            "a search covers every dimension except experts",
            "plan.search=false, or expert_parallel_size=1",
        )
    best: dict[tuple[object, ...], Found] = {}
    smallest: Found | None = None
    for recompute in _RECOMPUTE:
        prepared = _prepare(resolved, cluster, rates, recompute)
        if prepared is None:
            continue
        sharded, recorded, estimator = prepared
        flops = flops_per_sample(recorded.model, recorded.shape, num_images=recorded.images_per_row)
        for layout in list_layouts(resolved, sharded, cluster):
            estimate = estimator.estimate(layout)
            mfu = None
            if flops is not None:
                mfu = flops.palm * batch / estimate.step_seconds / (peak_tflops * 1e12 * cluster.num_devices)
            found = Found(recompute=recompute, estimate=estimate, mfu=mfu)
            if smallest is None or estimate.peak_bytes < smallest.estimate.peak_bytes:
                smallest = found
            key = recompute, layout.mesh.tensor, layout.mesh.context, layout.pipeline.num_stages
            if estimate.peak_bytes <= limit_bytes and (
                key not in best or estimate.step_seconds < best[key].estimate.step_seconds
            ):
                best[key] = found
    if smallest is None:
        raise ConfigError(
            "plan.search=true",
            "no layout divides the devices and the global batch",
            f"global_batch_size={cluster.num_devices}",
        )
    return sorted(best.values(), key=lambda found: found.estimate.step_seconds), smallest


def list_layouts(resolved: ResolvedRun, sharded: ResolvedRun, cluster: Cluster) -> Iterator[Layout]:
    """Yield every layout whose sizes divide what they split.

    Args:
        resolved: The run, to check which options can be combined.
        sharded: The run under FSDP2.
        cluster: The devices.
    """
    world, batch, model = cluster.num_devices, sharded.global_batch_size, sharded.model
    seq_len = sharded.seq_len or 0
    heads = model.num_heads or 1
    splits = math.gcd(heads, model.num_kv_heads or heads)
    splits = math.gcd(splits, model.moe_intermediate_size or model.ffn_hidden_size or 4 * (model.hidden_size or 1))
    can_divide = [_can_divide(resolved, name) for name in MODEL_SIZES]
    schedule = sharded.pipeline_schedule
    tensors = [size for size in _divisors(cluster.per_node) if splits % size == 0] if can_divide[0] else [1]
    contexts = _divisors(world, most=_MOST_CONTEXT) if can_divide[1] else [1]
    pipelines = [Pipeline(num_stages=size, schedule=schedule) for size in _divisors(world, most=_MOST_STAGES)]
    most_stages = (model.num_layers or 1) if can_divide[2] else 1
    for tensor, context, pipeline in product(tensors, contexts, pipelines):
        stages, rest = pipeline.num_stages, world % (tensor * context * pipeline.num_stages)
        if rest or (stages > 1 and stages * pipeline.num_chunks > most_stages):
            continue
        data = world // (tensor * context * stages)
        if batch % data or (context > 1 and (heads // tensor) % context):
            continue
        if tensor * context > 1 and seq_len % (tensor * context):
            continue
        for shard, micro in product(_divisors(data), _divisors(batch // data, most=_MOST_MICRO_BATCH)):
            if stages > 1 and batch // data // micro < least_micro_batches(schedule, stages):
                continue
            mesh = Mesh(replicate=data // shard, shard=shard, context=context, tensor=tensor)
            yield Layout(mesh=mesh, pipeline=pipeline, micro_batch_size=micro, num_micro_batches=batch // data // micro)


def describe_search(found: Sequence[Found], smallest: Found, *, limit_bytes: float) -> Iterator[str]:
    """Yield a table of the fastest layouts, and the overrides of the first."""
    if not found:
        gib = smallest.estimate.peak_bytes / 2**30
        yield f"search: nothing fits into {limit_bytes / 2**30:.1f} GiB; the smallest needs {gib:.1f} GiB:"
        yield f"  {' '.join(smallest.overrides())}"
        return
    unit, unit_bytes = size_unit(max(each.estimate.peak_bytes for each in found[:_AT_MOST]))
    yield f"search: the fastest of {len(found)} meshes that fit, estimated from a few recorded blocks:"
    yield (
        f"  {'tensor':>6} {'context':>7} {'pipeline':>8} {'shard':>6} {'replicate':>9} {'micro-batch':>11}"
        f" {'recompute':<11} {unit:>6} {'step, s':>8} {'MFU':>5} {'waiting':>7} {'bubble':>6}"
    )
    for each in found[:_AT_MOST]:
        estimate, layout = each.estimate, each.estimate.layout
        mesh = layout.mesh
        mfu = "" if each.mfu is None else f"{each.mfu:.2f}"
        waiting = estimate.exposed_seconds / estimate.step_seconds
        yield (
            f"  {mesh.tensor:>6} {mesh.context:>7} {layout.pipeline.num_stages:>8} {mesh.shard:>6}"
            f" {mesh.replicate:>9} {f'{layout.micro_batch_size} x {layout.num_micro_batches}':>11}"
            f" {each.recompute:<11} {estimate.peak_bytes / unit_bytes:>6.1f} {estimate.step_seconds:>8.3g} {mfu:>5}"
            f" {waiting:>7.0%} {estimate.bubble:>6.0%}"
        )
    yield f"search: {' '.join(found[0].overrides())}"


def as_json(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Return the fastest layouts for `plan.json`."""
    return [
        {
            "overrides": each.overrides(),
            "memory_gib": round(each.estimate.peak_bytes / 2**30, 3),
            "step_seconds": each.estimate.step_seconds,
            "mfu": each.mfu,
            "exposed_fraction": round(each.estimate.exposed_seconds / each.estimate.step_seconds, 4),
            "bubble": round(each.estimate.bubble, 4),
        }
        for each in found[:_AT_MOST]
    ]


def _prepare(
    resolved: ResolvedRun, cluster: Cluster, rates: Rates, recompute: str
) -> tuple[ResolvedRun, Recorded, Estimator] | None:
    """Record the places of a model under one recompute option; None: the config does not allow it."""
    sharded = with_overrides(
        resolved,
        ["strategy=fsdp", f"activation_checkpoint={recompute}", *(f"{name}=1" for name in MODEL_SIZES)],
    )
    if sharded is None:
        return None
    two = replace(cluster, per_node=2, num_nodes=1)
    can_divide = _can_divide(resolved, "tensor_parallel_size")
    is_compiled = sharded.compile_mode_on(gpu=cluster.device.full_name is not None) is not None

    def record(*, tensor: int, samples: int) -> tuple[Recorded, Places]:
        sizes: dict[str, int | None] = {"tensor_parallel_size": tensor, "micro_batch_size": samples}
        sizes |= {"global_batch_size": 2 * samples * (2 // tensor)}  # two micro-batches, so that gradients exist
        sizes |= {"data_parallel_replicate": None, "data_parallel_shard": None}
        found = record_config(sharded.with_settings(sizes | {"trainer.accumulate_grad_batches": None}), two)
        if found.reason is not None:
            raise ConfigError("plan.search=true", f"no step can be recorded: {found.reason[:120]}", "plan.search=false")
        step = time_step(found.ops, rates, is_compiled=is_compiled)
        return found, with_seconds(describe_places(found.ops, found.model), step)

    first, one = record(tensor=1, samples=1)
    recordings = Recordings(
        one=one,
        two_samples=record(tensor=1, samples=2)[1],
        two_ranks=record(tensor=2, samples=1)[1] if can_divide else None,
        num_context_passes=3 if recompute == "full" else 2,
        launch_seconds=rates.launch_seconds[is_compiled],
        num_shards=2,
    )
    return sharded, first, Estimator(recordings, _describe_shape(first), cluster)


def _describe_shape(recorded: Recorded) -> Shape:
    model, precision = recorded.model, recorded.step.precision
    held = recorded.ops[0].allocated
    buffers = float(sum(buffer.nbytes for buffer in model.buffers()))
    state = 2 * (held.get(WEIGHTS, 0) - buffers) + 2 * (held.get(GRADIENTS, 0) + held.get(OPTIMIZER, 0))
    heads, hidden = int(getattr(model, "num_heads", 0)), int(getattr(model, "hidden_size", 0))
    size = int(getattr(model, "head_dim", 0) or (hidden // heads if heads else 0))
    sharding = recorded.engine.sharding
    return Shape(
        seq_len=recorded.shape[0],
        hidden_size=hidden,
        context_elements=2.0 * (heads + int(getattr(model, "num_kv_heads", heads))) * size,
        residual_itemsize=precision.param_dtype.itemsize,
        compute_itemsize=precision.compute_dtype.itemsize,
        reduce_itemsize=(sharding.reduce_dtype if sharding is not None else torch.float32).itemsize,
        state_bytes=state / recorded.num_parameters,
        gradient_bytes=2 * held.get(GRADIENTS, 0) / recorded.num_parameters,
        buffer_bytes=buffers,
    )


def _can_divide(resolved: ResolvedRun, name: str) -> bool:
    """Return whether the run accepts a size above 1 for a dimension."""
    others = [f"{other}=1" for other in MODEL_SIZES if other != name]
    return with_overrides(resolved, ["strategy=fsdp", *others, f"{name}=2"]) is not None


def _divisors(number: int, *, most: int | None = None) -> list[int]:
    """Return the divisors of a number, up to `most`."""
    return [size for size in range(1, min(number, most or number) + 1) if number % size == 0]
