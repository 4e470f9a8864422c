"""Plan a run's memory, time and disk usage in advance. Needs no GPU; takes seconds for any model."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from recipes.config.check.preference import list_references
from recipes.config.resolved import ResolvedRun
from recipes.config.traits import declare_mode
from recipes.errors import ConfigError
from recipes.files import write_atomically
from recipes.mode.about import describe_command
from recipes.plan.advice import Planner, advise_settings, with_overrides
from recipes.plan.assumptions import Assumptions
from recipes.plan.hardware import MEASURED, Cluster, find_cluster
from recipes.plan.measured import OperatorTimer
from recipes.plan.plan import get_limit, make_plan
from recipes.plan.references import as_json as references_as_json
from recipes.plan.references import describe_references, plan_references
from recipes.plan.rollouts import as_json as rollouts_as_json
from recipes.plan.rollouts import describe_rollouts, plan_rollouts
from recipes.plan.roofline import Rates, get_rates, kind_of
from recipes.plan.scaling import as_json as scaling_as_json
from recipes.plan.scaling import describe_scaling, plan_scaling
from recipes.plan.search import Found, describe_search, search_layouts
from recipes.plan.search import as_json as search_as_json
from recipes.plan.table import as_json, describe_memory, describe_rules, describe_time, measure_run
from recipes.precision import Precision
from recipes.run_folder import PLAN_FILE, claim_output, has_keys, is_page
from recipes.runtime.console import LOGGER

PAGE = "plan.html"


@declare_mode(plans_steps=True)
def plan(
    resolved: ResolvedRun,
    *,
    path: str | None,
    advise: bool,
    max_ranks: Annotated[int, ">= 1"] | None,
    find_peak: Callable[[str, str], Any],
    write_page: Callable[..., None],
) -> int:
    """Print the resources that a run will need, and write them as JSON and as a page.

    Args:
        resolved: The run to plan.
        path: Folder for `plan.json` and `plan.html`; None only prints.
        advise: Also try other strategies and micro-batch sizes.
        max_ranks: Also plan the run on increasing numbers of ranks, up to this many; None skips this.
        find_peak: (device, kind of arithmetic) -> dense peak.
        write_page: (file, plan as JSON, printed lines) -> writes the page; it is also given `about`, of this command.

    Returns:
        The exit code, 0, whether the run fits or not.

    Raises:
        ConfigError: There is no such device, or the batch does not divide over its ranks,
            or `path` cannot be written to.
    """
    written = {PLAN_FILE: has_keys("num_parameters", "peak_memory_gib"), PAGE: is_page}
    folder = None if path is None else claim_output(path, "mode.path", replaces=written)
    assumed: Assumptions = resolved.make("plan")
    cluster = _find_cluster(resolved, assumed)
    if max_ranks is not None and max_ranks < cluster.per_node:
        raise ConfigError(
            f"mode.max_ranks={max_ranks}",
            f"whole nodes are planned, and one has {cluster.per_node} ranks",
            f"mode.max_ranks={cluster.per_node}, or mode.max_ranks=null, or trainer.devices={max_ranks} beside it",
        )
    precision: Precision = resolved.make("precision")
    rates = _find_rates(cluster, find_peak, precision)
    own_device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timer = OperatorTimer(own_device) if assumed.hardware == MEASURED else None
    kind = kind_of(precision.compute_dtype)
    lines: list[str] = []
    chosen, found = resolved, list[Found]()
    if assumed.search:
        chosen, found = _search(resolved, assumed, cluster, rates, kind, lines)
    planned = make_plan(chosen, cluster, rates=timer or rates)
    length = measure_run(
        planned,
        chosen,
        peak_tflops=None if rates is None else rates.tflops.get(kind),
        expect_mfu=assumed.expect_mfu,
        dollars_per_hour=assumed.dollars_per_hour,
    )
    shown = [
        f"plan: {planned.num_parameters:,} parameters on {planned.num_ranks} x {cluster.device.name},"
        f" {_describe(precision)}",
        *describe_memory(planned),
        *describe_rules(planned, chosen),
        *describe_time(planned, length, None if timer is not None else rates),
    ]
    _show(shown, lines)
    references = plan_references(chosen, planned, list_references(chosen), cluster, rates=timer or rates)
    _show(describe_references(references), lines)
    rollouts = plan_rollouts(chosen, planned, rates=timer or rates)
    _show(describe_rollouts(rollouts), lines)
    if advise and not found and planned.not_recorded is None:  # slower than everything above
        planner = Planner(cluster)
        planner.keep(chosen, planned)
        _show(advise_settings(resolved, planner), lines)
    record = as_json(planned, length, planned.flops)
    if references:
        record["references"] = references_as_json(references)
    if rollouts is not None:
        record["rollouts"] = rollouts_as_json(rollouts)
    if found:
        record["search"] = search_as_json(found)
    if max_ranks is not None:
        record["scaling"] = _scale(resolved, assumed, cluster, rates, max_ranks, lines)
    if folder is not None:
        _write(folder, record, lines, partial(write_page, about=describe_command(resolved)))
    return 0


def _find_cluster(resolved: ResolvedRun, assumed: Assumptions) -> Cluster:
    return find_cluster(
        assumed.hardware,
        per_node=resolved.devices_per_node,  # None: all devices of a node
        num_nodes=resolved.num_nodes,
        interconnect=assumed.interconnect,
        memory_gib=assumed.memory_gib,
    )


def _search(
    resolved: ResolvedRun, assumed: Assumptions, cluster: Cluster, rates: Rates | None, kind: str, lines: list[str]
) -> tuple[ResolvedRun, list[Found]]:
    """Print the fastest meshes; return the run of the first, or of the smallest if none fits."""
    if rates is None:
        raise ConfigError(
            f"plan.search=true plan.hardware={assumed.hardware}",
            "times are estimated for a device of the table, with its peak and its links",
            "plan.hardware=h100x8",
        )
    limit_bytes = get_limit(cluster)
    found, smallest = search_layouts(resolved, cluster, rates, limit_bytes=limit_bytes, peak_tflops=rates.tflops[kind])
    _show(describe_search(found, smallest, limit_bytes=limit_bytes), lines)
    chosen = with_overrides(resolved, (found[0] if found else smallest).overrides())
    assert chosen is not None, "each of its sizes was composed before"
    return chosen, found


def _show(shown: Iterable[str], lines: list[str]) -> None:
    """Print lines, and append them to `lines` for the page."""
    for line in shown:
        lines.append(line)
        LOGGER.info(line)


def _scale(
    resolved: ResolvedRun,
    assumed: Assumptions,
    cluster: Cluster,
    rates: Rates | None,
    max_ranks: int,
    lines: list[str],
) -> dict[str, Any]:
    """Print and return the plan for increasing numbers of ranks."""
    if rates is None:
        raise ConfigError(
            f"mode.max_ranks={max_ranks} plan.hardware={assumed.hardware}",
            "a plan for more ranks needs a device of the table, with its peak and its links",
            "plan.hardware=h100x8",
        )
    curves = dict(plan_scaling(resolved, cluster, rates, max_ranks=max_ranks))
    num_tokens = resolved.tokens_per_sample
    described = describe_scaling(
        curves,
        seq_len=num_tokens,
        steps=resolved.max_steps,
        batch=resolved.global_batch_size,
        price=assumed.dollars_per_hour,
    )
    _show(described, lines)
    return scaling_as_json(curves, num_tokens)


def _describe(precision: Precision) -> str:
    """Return the name of a precision, and its stand-in if the plan has no model of its matrix products."""
    is_float8 = precision.name == "fp8-mixed"
    return f"{precision.name}, its products planned as bfloat16" if is_float8 else precision.name


def _find_rates(cluster: Cluster, find_peak: Callable[[str, str], Any], precision: Precision) -> Rates | None:
    """Return the achievable rates of a device; None for a CPU or without a published peak or bandwidth."""
    device = cluster.device
    if device.full_name is None or device.bandwidth is None:
        return None
    kinds = {"bf16": "bf16", "fp16": "fp16", "fp32": "tf32" if precision.name == "tf32" else "fp32"}
    peaks = {kind: find_peak(device.full_name, measured).tflops for kind, measured in kinds.items()}
    if any(value is None for value in peaks.values()):
        return None
    return get_rates(device.full_name, tflops=peaks, bandwidth=device.bandwidth)


def _write(folder: Path, record: dict[str, Any], lines: Sequence[str], write_page: Callable[..., None]) -> None:
    write_atomically(folder / PLAN_FILE, json.dumps(record, indent=2) + "\n")
    write_page(folder / PAGE, record, lines)
    LOGGER.info(str(folder / PAGE))
