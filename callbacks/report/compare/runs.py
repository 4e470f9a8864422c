"""Many run folders, each read once and kept thin: what the page of a comparison shows. No Lightning."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..charts.downsample import MAX_BUCKETS, thin
from ..charts.series import MAX_POINTS
from ..charts.svg import NUM_COLORS, Color
from ..dashboard import Panel, Section
from ..run_record import Point, RunRecord, how_it_ended, metric_names, read_run
from .values import (
    METRICS_OF,
    differing,
    find_best,
    get_value,
    is_better_when_more,
)

PICTURE_WEIGHT = 4  # a panel of the picture is drawn so much finer than any other
_MIN_BUCKETS = 3


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One row of the table.

    Attributes:
        values: Numbers of the summary by name; None where unknown.
        best: Of each metric that a bar panel names.
        curves: By metric, thinned.
        parameters: Those that differ between the runs.
    """

    name: str
    folder: Path
    status: str
    color: Color
    values: dict[str, float | None]
    best: dict[str, float | None]
    curves: dict[str, list[Point]]
    parameters: dict[str, Any] = field(default_factory=dict)


def read_runs(
    folders: Sequence[Path], sections: Sequence[Section], *, sort: str
) -> list[ComparedRun]:
    """Every run, those with the best value of `sort` first and those without one last.

    Raises:
        LookupError: No run has `sort`, but some have other numbers.
    """
    panels = [panel for section in sections for panel in section.panels]
    metrics = get_weights(folders, panels)
    budget = MAX_POINTS / 4 / max(1, sum(len(among) * w for among, w in metrics.values()))
    first = [name for panel in panels for name in panel.parameters]
    read = [_thin_record(folder, metrics, panels, budget) for folder in folders]
    measures = list(dict.fromkeys([sort, *METRICS_OF]))
    values = [{m: get_value(record, m) for m in measures} | own for record, own, _ in read]
    known = {m for one in values for m, value in one.items() if value is not None}
    if sort not in known and known - {"steps"}:
        raise LookupError(f"no run has it; they have {', '.join(sorted(known))}")
    parameters = differing([record for record, _, _ in read], first)
    order = sorted(range(len(read)), key=lambda i: sort_key(values[i][sort], sort))
    names = run_names(folders)
    return [
        ComparedRun(
            name=names[i],
            folder=folders[i],
            status=get_status(read[i][0]),
            color=get_color(rank, values[i][sort], len(order)),
            values=values[i],
            best=read[i][2],
            curves=read[i][0].series,
            parameters={name: of_runs[i] for name, of_runs in parameters.items()},
        )
        for rank, i in enumerate(order)
    ]


def get_status(run: RunRecord) -> str:
    """How it ended, if anything says so; a folder without a row and without an event is of a run that never began."""
    return how_it_ended(run) or ("unknown" if run.series else "did not start")


def get_weights(
    folders: Sequence[Path], panels: Sequence[Panel]
) -> dict[str, tuple[list[Path], int]]:
    """Each metric that is drawn: the runs that have it, and how finely it is drawn."""
    written = {folder: metric_names(folder / "metrics.csv") for folder in folders}
    every = list(dict.fromkeys(name for names in written.values() for name in names))
    found: dict[str, tuple[list[Path], int]] = {}
    for panel in panels:
        if panel.kind != "line":
            continue
        for name in panel.metrics_among(every):
            among = [folder for folder in folders if name in written[folder]]
            found.setdefault(name, (among, PICTURE_WEIGHT if panel.picture else 1))
    return found


def _thin_record(
    folder: Path,
    metrics: dict[str, tuple[list[Path], int]],
    panels: Sequence[Panel],
    budget: float,
) -> tuple[RunRecord, dict[str, float | None], dict[str, float | None]]:
    """A run with thin curves; what thinning would change is computed before."""
    record = read_run(folder, needs_metrics=False)
    own = {"best_val_loss": get_value(record, "best_val_loss")}
    best = {
        name: find_best([value for _, value in record.series[name]], name)
        for panel in panels
        if panel.kind == "bar"
        for name in panel.metrics_among(record.series)
    }
    kept = {
        name: thin(points, max_buckets=_buckets(metrics[name][1], budget) if name in metrics else 1)
        for name, points in record.series.items()
    }
    record.series.clear()
    record.series.update(kept)
    return record, own, best


def _buckets(weight: int, budget: float) -> int:
    return max(_MIN_BUCKETS, min(MAX_BUCKETS, int(weight * budget)))


def sort_key(value: float | None, measure: str) -> tuple[bool, float]:
    """Best first, unknown last."""
    if value is None:
        return True, 0.0
    return False, -value if is_better_when_more(measure) else value


def get_color(rank: int, value: float | None, num_runs: int) -> Color:
    """One color a run; of many runs, from blue for the best to red for the worst."""
    if num_runs <= NUM_COLORS:
        return Color(f"c{rank}")
    if value is None:
        return Color("none")
    return Color("ramp", round(250 - 240 * rank / (num_runs - 1)))


def run_names(folders: Sequence[Path]) -> list[str]:
    """Paths from where they all lie."""
    parent = common_parent(folders)
    return [Path(os.path.relpath(folder.resolve(), parent)).as_posix() for folder in folders]


def common_parent(folders: Sequence[Path]) -> Path:
    """The deepest folder that they all lie in."""
    return Path(os.path.commonpath([folder.resolve().parent for folder in folders]))


def in_order(folders: Sequence[Path]) -> list[Path]:
    """Job 2 of a sweep before job 10."""
    return sorted(
        folders,
        key=lambda path: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", str(path))],
    )
