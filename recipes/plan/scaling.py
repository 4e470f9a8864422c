"""Estimate memory, time and price of a run under every strategy, up to thousands of ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError
from recipes.numerics.accumulation import divide
from recipes.plan.advice import with_overrides
from recipes.plan.hardware import GIB, Cluster
from recipes.plan.plan import make_plan, size_unit
from recipes.plan.roofline import Rates

STRATEGIES = ("ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "fsdp", "hsdp")
# doubling the ranks must increase throughput by at least this factor: half of the ideal gain
_WORTHWHILE = 1.5


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """Estimate for a run on a number of ranks.

    Attributes:
        num_ranks: Number of ranks.
        peak_bytes: Peak memory per rank.
        fits: Whether this fits into a device.
        samples_per_second: Throughput of all ranks.
        exposed_fraction: Fraction of a step spent waiting for communication.
    """

    num_ranks: int
    peak_bytes: int
    fits: bool
    samples_per_second: float
    exposed_fraction: float


def plan_scaling(
    resolved: ResolvedRun, cluster: Cluster, rates: Rates, *, max_ranks: int
) -> Iterator[tuple[str, list[ScalePoint]]]:
    """Yield each strategy with its points: whole nodes, doubled each time, at a constant global batch.

    A strategy ends where the batch no longer divides over the ranks. The micro-batch size is that of the config, or the
    largest smaller one that divides a rank's share of the batch.

    Args:
        resolved: The run.
        cluster: Devices of one node and links.
        rates: Rates of a device.
        max_ranks: Maximum number of ranks.
    """
    for strategy in STRATEGIES:
        changed = with_overrides(resolved, [f"strategy={strategy}"])
        if changed is None:
            continue
        points: list[ScalePoint] = []
        nodes = 1
        while nodes * cluster.per_node <= max_ranks:
            point = _plan_point(changed, replace(cluster, num_nodes=nodes), rates)
            if point is None:
                break
            points.append(point)
            nodes *= 2
        yield strategy, points


def _plan_point(resolved: ResolvedRun, cluster: Cluster, rates: Rates) -> ScalePoint | None:
    per_rank, rest = divmod(resolved.global_batch_size, cluster.num_devices)
    if rest or per_rank == 0:
        return None
    wanted = resolved.micro_batch_size or _own_size(resolved)
    size = next(number for number in range(min(wanted, per_rank), 0, -1) if per_rank % number == 0)
    settings = {"trainer.accumulate_grad_batches": None, "trainer.num_nodes": cluster.num_nodes}
    try:
        planned = make_plan(resolved.with_settings(settings | {"micro_batch_size": size}), cluster, rates=rates)
    except ConfigError:  # the mesh does not divide the ranks
        return None
    times = planned.times
    if times is None:
        return None
    return ScalePoint(
        num_ranks=cluster.num_devices,
        peak_bytes=planned.peak.total,
        fits=planned.fits,
        samples_per_second=resolved.global_batch_size / times.step_seconds,
        exposed_fraction=times.communication.exposed_seconds / times.step_seconds,
    )


def _own_size(resolved: ResolvedRun) -> int:
    """Return the micro-batch size that the run has on its own devices, without accumulation."""
    count = resolved.devices if isinstance(resolved.devices, int) and resolved.devices > 0 else 1
    return divide(
        global_batch_size=resolved.global_batch_size,
        micro_batch_size=None,
        num_devices=count,
        accumulate_grad_batches=None,
    ).micro_batch_size


def find_limit(points: Sequence[ScalePoint]) -> int | None:
    """Return the rank count beyond which doubling brings less than half of the ideal gain; None: beyond the last point.

    Args:
        points: Points of one strategy.
    """
    fitting = [point for point in points if point.fits]
    for here, there in pairwise(fitting):
        if there.samples_per_second < _WORTHWHILE * here.samples_per_second:
            return here.num_ranks
    return None


def describe_scaling(
    curves: Mapping[str, Sequence[ScalePoint]], *, seq_len: int | None, steps: int, batch: int, price: float | None
) -> Iterator[str]:
    """Yield a table with a row per strategy and rank count that fits.

    Args:
        curves: Points by strategy.
        seq_len: Tokens per sample; None: the samples are not text, or are padded.
        steps: Optimizer steps of the run.
        batch: Samples per step.
        price: Dollars per device-hour; None: unknown.
    """
    speed, factor = ("samples/s", 1) if seq_len is None else ("tokens/s", seq_len)
    unit, unit_bytes = size_unit(max((point.peak_bytes for points in curves.values() for point in points), default=GIB))
    yield f"scaling at {batch:,} samples per step:"
    memory = f"{unit} per rank"
    yield f"  {'strategy':<18} {'ranks':>6} {memory:>12} {speed:>14} {'waiting':>8} {'hours':>9} {'dollars':>11}"
    for strategy, points in curves.items():
        if points and not any(point.fits for point in points):
            smallest = min(point.peak_bytes for point in points) / GIB
            yield f"  {strategy:<18} does not fit: needs at least {smallest:.1f} GiB per rank"
        for point in points:
            if not point.fits:
                continue
            hours = steps * batch / point.samples_per_second / 3600
            cost = "" if price is None else f"{hours * point.num_ranks * price:11,.0f}"
            yield (
                f"  {strategy:<18} {point.num_ranks:>6,} {point.peak_bytes / unit_bytes:>12.1f}"
                f" {point.samples_per_second * factor:>14,.0f} {point.exposed_fraction:>8.0%} {hours:>9,.1f} {cost:>11}"
            )
        limit = find_limit(points)
        if limit is not None:
            yield f"  {'':<18} beyond {limit:,} ranks, doubling them brings less than half of the ideal gain"


def as_json(curves: Mapping[str, Sequence[ScalePoint]], seq_len: int | None) -> dict[str, Any]:
    """Return the points by strategy for `plan.json`."""
    return {
        strategy: [
            {
                "ranks": point.num_ranks,
                "memory_gib": round(point.peak_bytes / GIB, 3),
                "fits": point.fits,
                "samples_per_second": point.samples_per_second,
                "tokens_per_second": None if seq_len is None else point.samples_per_second * seq_len,
                "exposed_fraction": round(point.exposed_fraction, 4),
            }
            for point in points
        ]
        for strategy, points in curves.items()
    }
