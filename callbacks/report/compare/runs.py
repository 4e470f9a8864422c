"""Read run folders and keep only what the comparison page shows: thinned curves and values. No Lightning."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..charts.figures import NUM_COLORS, Color
from ..charts.series import MAX_BUCKETS, MAX_POINTS, thin
from ..dashboard import Panel, Section
from ..run_record import Point, RunRecord, get_status, metric_names, read_run
from .values import (
    METRICS_BY_MEASURE,
    Directions,
    differing_parameters,
    find_best,
    get_directions,
    get_evaluations,
    get_value,
    is_higher_better,
)

PICTURE_WEIGHT = 4  # panels in curves.png get this many times more points than others
_MIN_BUCKETS = 3


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run of the comparison.

    Attributes:
        values: Measures, by their name in `summary.json`, and evaluations; None if unknown.
        best: The best value of each metric in a bar panel.
        curves: Thinned points by metric.
        parameters: Config values that differ between the runs; None if this run has none.
        declared: Directions of metrics, as all runs together declare them.
    """

    name: str
    folder: Path
    status: str
    color: Color
    values: dict[str, float | None]
    best: dict[str, float | None]
    curves: dict[str, list[Point]]
    parameters: dict[str, Any] = field(default_factory=dict)
    declared: Directions = field(default_factory=dict)


def read_runs(folders: Sequence[Path], sections: Sequence[Section], *, sort: str) -> list[ComparedRun]:
    """Read all runs, sorted by `sort` with the best first and runs without it last.

    Raises:
        LookupError: No run has `sort`, but some have other values.
    """
    panels = [panel for section in sections for panel in section.panels]
    named = [name for panel in panels for name in panel.parameters]
    runs = read_thin(folders, panels)
    evaluated = [measure for run in runs for measure in get_evaluations(run)]
    measures = list(dict.fromkeys([sort, *METRICS_BY_MEASURE, *evaluated]))
    values = [{measure: get_value(run, measure) for measure in measures} for run in runs]
    known = {m for measured in values for m, value in measured.items() if value is not None}
    if sort not in known and known - {"steps"}:
        raise LookupError(f"no run has it; they have {', '.join(sorted(known))}")
    parameters = differing_parameters(runs, named)
    declared = get_directions(runs)
    order = sorted(range(len(runs)), key=lambda i: sort_key(values[i][sort], sort, declared))
    names = run_names(folders)
    return [
        ComparedRun(
            name=names[i],
            folder=folders[i],
            # a folder without rows and events belongs to a run that never started
            status=get_status(runs[i]) or ("unknown" if runs[i].series else "did not start"),
            color=get_color(rank, values[i][sort], len(order)),
            values=values[i],
            best=_find_best_of_bars(runs[i], panels, declared),
            curves=runs[i].series,
            parameters={name: by_run[i] for name, by_run in parameters.items()},
            declared=declared,
        )
        for rank, i in enumerate(order)
    ]


def read_thin(folders: Sequence[Path], panels: Sequence[Panel]) -> list[RunRecord]:
    """Read runs, with curves of only as many points as one page of all panels can draw."""
    metrics = get_weights(folders, panels)
    total_weight = sum(len(having) * weight for having, weight in metrics.values())
    buckets_per_weight = MAX_POINTS / 4 / max(1, total_weight)
    return [_read_thin(folder, metrics, buckets_per_weight) for folder in folders]


def get_weights(folders: Sequence[Path], panels: Sequence[Panel]) -> dict[str, tuple[list[Path], int]]:
    """Return, for each metric drawn, the runs that have it and its weight when points are allocated."""
    written = {folder: metric_names(folder / "metrics.csv") for folder in folders}
    found: dict[str, tuple[list[Path], int]] = {}
    for panel in panels:
        if panel.kind != "line":
            continue
        drawn = {folder: panel.metrics_among(written[folder]) for folder in folders}
        for name in dict.fromkeys(chain.from_iterable(drawn.values())):
            having = [folder for folder in folders if name in drawn[folder]]
            found.setdefault(name, (having, PICTURE_WEIGHT if panel.picture else 1))
    return found


def _read_thin(folder: Path, metrics: dict[str, tuple[list[Path], int]], buckets_per_weight: float) -> RunRecord:
    """Read a run and thin its curves immediately, so that full curves of many runs are never in memory together.

    The lowest, highest and last value of each curve are kept.
    """
    record = read_run(folder, needs_metrics=False)
    budgets = {name: int(weight * buckets_per_weight) for name, (_, weight) in metrics.items()}
    thinned = {
        name: thin(points, max_buckets=max(_MIN_BUCKETS, min(MAX_BUCKETS, budgets[name])) if name in budgets else 1)
        for name, points in record.series.items()
    }
    return replace(record, series=thinned)


def _find_best_of_bars(run: RunRecord, panels: Sequence[Panel], declared: Directions) -> dict[str, float | None]:
    return {
        name: find_best([value for _, value in run.series[name]], name, declared)
        for panel in panels
        if panel.kind == "bar"
        for name in panel.metrics_among(run.series)
    }


def sort_key(value: float | None, measure: str, declared: Directions) -> tuple[bool, float]:
    """Return a key that sorts the best value first and unknown values last."""
    if value is None:
        return True, 0.0
    return False, -value if is_higher_better(measure, declared) else value


def get_color(rank: int, value: float | None, num_runs: int) -> Color:
    """Return a distinct color for a run; for many runs, a ramp from blue for the best to red for the worst."""
    if num_runs <= NUM_COLORS:
        return Color(f"c{rank}")
    if value is None:
        return Color("none")
    return Color("ramp", round(250 - 240 * rank / (num_runs - 1)))


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return the runs' paths relative to their deepest common folder."""
    parent = common_parent(folders)
    return [Path(os.path.relpath(folder.resolve(), parent)).as_posix() for folder in folders]


def common_parent(folders: Sequence[Path]) -> Path:
    """Return the deepest folder that contains all runs."""
    return Path(os.path.commonpath([folder.resolve().parent for folder in folders]))


def in_natural_order(folders: Sequence[Path]) -> list[Path]:
    """Sort folders in natural order: job 2 of a sweep before job 10."""
    return sorted(
        folders,
        key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))],
    )
