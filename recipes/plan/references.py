"""What the reference of preference tuning costs, by its kind: memory and time of each step, or time before the first.

Each kind is planned as a run of its own, and compared with one whose reference was computed in advance, which adds
nothing to a step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.config.resolved import ResolvedRun
from recipes.config.signature import find_signature
from recipes.plan.hardware import Cluster
from recipes.plan.measured import OperatorTimer
from recipes.plan.plan import Plan, gib, make_plan, size_unit
from recipes.plan.roofline import Rates

IN_ADVANCE = "precomputed"
_SHOWN = 1_000  # samples


@dataclass(frozen=True, kw_only=True)
class ReferenceCost:
    """Cost of one kind of reference.

    Attributes:
        kind: As in `task.reference`.
        peak_bytes: Peak memory of a rank in a step with it.
        added_bytes: Bytes of that peak that are there for the reference.
        added_seconds: Seconds of a step that are there for the reference; None: unknown.
        seconds_before: Seconds per sample before the first step, with the ranks of the run; 0: none; None: unknown.
    """

    kind: str
    peak_bytes: int
    added_bytes: int
    added_seconds: float | None
    seconds_before: float | None


def plan_references(
    resolved: ResolvedRun, planned: Plan, kinds: Sequence[str], cluster: Cluster, *, rates: Rates | OperatorTimer | None
) -> list[ReferenceCost]:
    """Return the cost of each kind of reference that a run can have, the chosen one first.

    Args:
        resolved: The run.
        planned: Its plan.
        kinds: Kinds, the chosen one first; empty: the run has no reference.
        cluster: The devices.
        rates: As for `make_plan`.
    """
    if not kinds:
        return []
    plans = {kinds[0]: planned}
    for kind in {*kinds[1:], IN_ADVANCE} - plans.keys():
        variant = resolved.with_settings({"task": {**resolved.config["task"], "reference": kind}})
        plans[kind] = make_plan(variant, cluster, rates=rates)
    # of KTO, the answer to another prompt is measured, too
    num_passes = 2 if find_signature(resolved.config["loss"]["_target_"]).constants.get("reads_kl") else 1
    return [_compare(kind, plans[kind], plans[IN_ADVANCE], num_passes=num_passes) for kind in kinds]


def _compare(kind: str, plan: Plan, without: Plan, *, num_passes: int) -> ReferenceCost:
    times, least = plan.times, without.times
    samples_at_once = plan.accumulation.micro_batch_size * plan.mesh.data_size
    before = None if least is None else num_passes * least.forward_seconds / samples_at_once
    return ReferenceCost(
        kind=kind,
        peak_bytes=plan.peak.total,
        added_bytes=plan.peak.total - without.peak.total,
        added_seconds=None if times is None or least is None else times.step_seconds - least.step_seconds,
        seconds_before=before if kind == IN_ADVANCE else 0.0,
    )


def describe_references(costs: Sequence[ReferenceCost]) -> Iterator[str]:
    """Yield a table with a row for each kind; nothing if there is none."""
    if not costs:
        return
    unit, unit_bytes = size_unit(max(cost.peak_bytes for cost in costs))
    yield f"reference:          peak in {unit}  of it for the reference  in each step  before the first step"
    for number, cost in enumerate(costs):
        once = "nothing"
        if cost.seconds_before is None:
            once = "a forward pass of each sample"
        elif cost.seconds_before:
            once = f"{cost.seconds_before * _SHOWN:.3g} s for each {_SHOWN:,} samples"
        step = "unknown" if cost.added_seconds is None else f"{max(cost.added_seconds, 0.0):.3g} s"
        chosen = " (here)" if number == 0 else ""
        yield (
            f"  {cost.kind + chosen:<18} {cost.peak_bytes / unit_bytes:11.2f}"
            f"  {cost.added_bytes / unit_bytes:23.2f}  {step:>12}  {once}"
        )


def as_json(costs: Sequence[ReferenceCost]) -> list[Mapping[str, Any]]:
    """Return the costs for `plan.json`."""
    return [
        {
            "reference": cost.kind,
            "peak_memory_gib": round(gib(cost.peak_bytes), 4),
            "added_gib": round(gib(cost.added_bytes), 4),
            "added_seconds_per_step": cost.added_seconds,
            "seconds_per_sample_before": cost.seconds_before,
        }
        for cost in costs
    ]
