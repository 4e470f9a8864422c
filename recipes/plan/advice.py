"""Find settings that fit: the least sharding, then the largest micro-batch, and the savings of each measure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.config import compose_and_check
from recipes.config.epochs import MAX_STEPS
from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError
from recipes.plan.hardware import Cluster
from recipes.plan.plan import Plan, gib, make_plan, plan_state, size_unit
from recipes.plan.recorded import divide_ranks
from recipes.runtime import status

_HSDP = ("strategy=hsdp",)
# in order of decreasing memory per rank; the first is the fastest. ZeRO 2 and 3 are excluded: FSDP2 has the same
# traffic and uses less memory
_LADDER = (
    ("strategy=single",),
    ("strategy=ddp",),
    ("strategy=deepspeed_stage_1",),
    _HSDP,
    ("strategy=fsdp",),
    ("strategy=fsdp", "strategy.cpu_offload=true"),
)
_SELECTIVE, _RECOMPUTE = "activation_checkpoint=selective", "activation_checkpoint=full"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Settings that fit.

    Attributes:
        overrides: Overrides to add to the command.
        plan: Plan with these overrides.
    """

    overrides: list[str]
    plan: Plan


class Planner:
    """Plans configs for a cluster, with a cache.

    Args:
        cluster: The devices.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._plans: dict[str, Plan] = {}

    def plan(self, resolved: ResolvedRun) -> Plan:
        """Return the plan of a run, without times."""
        key = _describe(resolved)
        if key not in self._plans:
            status.say(
                f"plan {len(self._plans) + 1}: {' '.join(resolved.overrides[-3:])}" if self._plans else "planning"
            )
            self._plans[key] = make_plan(resolved, self.cluster, rates=None)
        return self._plans[key]

    def keep(self, resolved: ResolvedRun, plan: Plan) -> None:
        """Keep a plan that has been made, for `plan` to return."""
        self._plans[_describe(resolved)] = plan


def _describe(resolved: ResolvedRun) -> str:
    """Return what a plan depends on."""
    return resolved.describe_settings(without=("hydra", "mode", "name", "plan"))


def advise_settings(resolved: ResolvedRun, planner: Planner) -> Iterator[str]:
    """Yield lines of advice: settings that fit, and the savings of each measure.

    Args:
        resolved: The run.
        planner: Planner for the run's devices.
    """
    planned = planner.plan(resolved)
    advice = find_settings(resolved, planner)
    if advice is None:
        yield "advice: nothing fits on these devices; savings of each measure on its own, in GiB at peak:"
        yield from (f"  {line}" for line in measures(resolved, planner))
        return
    total = advice.plan.peak.total
    shown = " ".join(advice.overrides)
    yield f"advice: {shown}"
    unit, unit_bytes = size_unit(total)
    filled, limit = total / unit_bytes, advice.plan.limit_bytes / unit_bytes
    yield f"  fills {filled:,.2f} of {limit:,.2f} {unit}, the least sharding that fits"
    if not planned.fits:
        yield "savings of each measure on its own, in GiB at peak:"
        yield from (f"  {line}" for line in measures(resolved, planner))


def find_settings(resolved: ResolvedRun, planner: Planner) -> Advice | None:
    """Return the least sharding that fits, then the least recomputation, then the largest micro-batch.

    Args:
        resolved: The run; its global batch does not change.
        planner: Planner for the run's devices.
    """
    planned, cluster = planner.plan(resolved), planner.cluster
    for strategy in _ladder(cluster):
        is_for_one = strategy[0] == "strategy=single"
        if is_for_one != (cluster.num_devices == 1) and "strategy.cpu_offload=true" not in strategy:
            continue
        if _least_bytes(strategy, planned, cluster) > planned.limit_bytes:
            continue  # does not fit even without activations
        for recompute in ("activation_checkpoint=none", _SELECTIVE, _RECOMPUTE):
            overrides = [*strategy, recompute]
            changed = with_overrides(resolved, overrides)
            if changed is None:
                continue
            found = _largest_micro_batch(changed, planner)
            if found is not None:
                size, plan = found
                return Advice(overrides=[*overrides, f"micro_batch_size={size}"], plan=plan)
    return None


def find_strategy(resolved: ResolvedRun, cluster: Cluster, *, limit_bytes: int) -> list[str] | None:
    """Return the least sharding or narrowing under which the state of a rank fits; None if there is none.

    Args:
        resolved: The run, whose state does not fit.
        cluster: The devices.
        limit_bytes: Memory of a rank.
    """
    is_gpu = cluster.device.full_name is not None
    ladder = _ladder(cluster)[1:] if cluster.num_devices > 1 else [_LADDER[-1]]
    candidates = [[*strategy] for strategy in ladder if is_gpu or len(strategy) == 1]  # a CPU offloads to itself
    for overrides in [*candidates, ["precision=bf16-true"]]:
        changed = with_overrides(resolved, overrides)
        if changed is None:
            continue
        try:
            needed = plan_state(changed, cluster)
        except ConfigError:  # the batch or the mesh does not divide evenly
            continue
        if needed is not None and needed <= limit_bytes:
            return overrides
    return None


def _ladder(cluster: Cluster) -> list[tuple[str, ...]]:
    """Return the distinct strategies for a cluster: on a single node, hsdp equals fsdp."""
    return [strategy for strategy in _LADDER if strategy != _HSDP or cluster.num_nodes > 1]


def _least_bytes(strategy: tuple[str, ...], planned: Plan, cluster: Cluster) -> float:
    """Return a lower bound on a rank's bytes of weights, gradients and optimizer state, in float32."""
    divided = planned.mesh.tensor * planned.pipeline.num_stages
    whole, optimizer = 4.0 * planned.num_parameters / divided, planned.optimizer_bytes / divided
    num_ranks = cluster.num_devices
    if len(strategy) > 1:  # offloaded
        return 0.0
    return {
        "strategy=deepspeed_stage_1": 2 * whole + (whole + optimizer) / num_ranks,
        "strategy=hsdp": (2 * whole + optimizer) / cluster.per_node,
        "strategy=fsdp": (2 * whole + optimizer) / num_ranks,
    }.get(strategy[0], 2 * whole + optimizer)


def _largest_micro_batch(resolved: ResolvedRun, planner: Planner) -> tuple[int, Plan] | None:
    """Return the largest micro-batch that fits and divides the global batch; None if one sample does not fit."""
    try:
        mesh = divide_ranks(resolved, planner.cluster)[1].mesh
    except ConfigError:  # the strategy does not support this mesh dimension
        return None
    per_rank, rest = divmod(resolved.global_batch_size, mesh.data_size)
    if rest or per_rank == 0:
        return None

    split: dict[str, int | None] = {"trainer.accumulate_grad_batches": None}

    def plan_with(size: int) -> Plan:
        return planner.plan(resolved.with_settings(split | {"micro_batch_size": size}))

    sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    smallest = plan_with(1)
    if not smallest.fits:
        return None
    if len(sizes) == 1:
        return 1, smallest
    # memory grows linearly with samples once activations determine the peak
    second = plan_with(sizes[1])
    growth = max((second.peak.total - smallest.peak.total) / (sizes[1] - 1), 1.0)
    room = 1 + (smallest.limit_bytes - smallest.peak.total) / growth
    for size in reversed([size for size in sizes if size <= room]):
        plan = smallest if size == 1 else second if size == sizes[1] else plan_with(size)
        if plan.fits:
            return size, plan
    return 1, smallest


def measures(resolved: ResolvedRun, planner: Planner) -> Iterator[str]:
    """Yield the savings of each measure alone, cheapest first."""
    planned = planner.plan(resolved)
    before, size, seq_len = planned.peak.total, planned.accumulation.micro_batch_size, resolved.seq_len
    candidates: list[list[str]] = []
    if size > 1:
        smaller = next(number for number in range(size // 2, 0, -1) if size % number == 0)
        candidates.append([f"micro_batch_size={smaller}", "trainer.accumulate_grad_batches=null"])
    if resolved.precision == "32-true":
        candidates.append(["precision=bf16-mixed"])
    candidates += [[_SELECTIVE], [_RECOMPUTE]]
    candidates += (
        [[*strategy] for strategy in _ladder(planner.cluster)[1:]] if planned.num_ranks > 1 else [[*_LADDER[-1]]]
    )
    if seq_len is not None and seq_len > 1:
        candidates.append([f"seq_len={seq_len // 2}"])
    for overrides in candidates:
        changed = with_overrides(resolved, overrides)
        if changed is None:
            continue
        try:
            total = planner.plan(changed).peak.total
        except ConfigError:  # the batch does not divide evenly
            continue
        if total < before:
            yield f"{' '.join(overrides):<58} {gib(before - total):8.2f}  leaves {gib(total):.2f}"


def with_overrides(resolved: ResolvedRun, overrides: list[str]) -> ResolvedRun | None:
    """Return the run of the same command with added overrides; None if they conflict."""
    changed, mistakes = compose_and_check(
        [*_without(resolved.overrides, overrides), *overrides],
        config_folder=Path(resolved.config_folder),
        config_name=resolved.config_name,
    )
    if mistakes or changed is None:
        return None
    if changed.epochs is not None and resolved.epochs is None:  # they have been counted, in samples of the same batch
        steps = dict.fromkeys(changed.list_followers(MAX_STEPS), resolved.max_steps)
        return replace(changed.with_settings(steps), epochs=None)
    return changed


def _without(typed: list[str], added: list[str]) -> list[str]:
    """Return the typed overrides without those in sections that a new option replaces."""
    groups = {override.partition("=")[0] for override in added if "." not in override.partition("=")[0]}
    return [override for override in typed if override.lstrip("+~").partition("=")[0].partition(".")[0] not in groups]
