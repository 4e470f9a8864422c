"""Which curves a run has, over which axes: plain arithmetic on lists."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..dashboard import Panel, Section
from ..run_record import Point, RunRecord
from .downsample import MAX_BUCKETS, segments, thin, trend

# Events of the run itself that charts do not mark. Any other kind is marked unless its record says otherwise in a
# field `mark`, which the callback that logs it declares, see `callbacks.events.EventKind`.
UNMARKED_EVENTS = ("start", "end", "checkpoint", "checkpoint_failed")
LOG_SCALE_RATIO = 100.0
MAX_POINTS = 180_000  # of all curves of a page: two megabytes
MAX_UNDONE_BUCKETS = 50
TREND_BUCKETS = 250
_MIN_BUCKETS, _MOST_BUCKETS = 60, 4000


@dataclass(frozen=True)
class Curve:
    """One metric, thinned. NaN and infinite values are points too: a line has a gap there."""

    metric: str
    points: list[Point]
    num_points: int  # before thinning
    num_not_finite: int
    first_not_finite: int | None  # step
    undone: list[list[Point]] = field(default_factory=list)  # by rollbacks, each a stretch
    trend: list[Point] = field(
        default_factory=list
    )  # means, where there is too much to see each point

    def segments(self) -> list[list[Point]]:
        """The stretches to draw as one line."""
        return segments(self.points)


@dataclass(frozen=True)
class Chart:
    """Curves that share their axes."""

    title: str
    curves: list[Curve]
    log_scale: bool
    x_range: tuple[int, int]
    y_range: tuple[float, float]  # of the finite values; low < high
    picture: bool = False


@dataclass(frozen=True)
class Group:
    """Charts under one heading."""

    title: str
    charts: list[Chart]


@dataclass(frozen=True)
class Mark:
    """An event on the step axis; what a rollback undid reaches from its step to `undone_to`."""

    step: int
    event: str
    undone_to: int | None = None


def get_groups(run: RunRecord, sections: Sequence[Section]) -> list[Group]:
    """The run's charts by section, all over the same steps; empty panels and sections are left out."""
    drawn = [
        (section.title, panel, names)
        for section in sections
        for panel in section.panels
        if panel.kind == "line" and (names := panel.metrics_among(run.series))
    ]
    every = [run.series[name] for _, _, names in drawn for name in names]
    if not every:
        return []
    steps = step_range([step for points in every for step, _ in points])
    buckets = buckets_for(len(every))
    groups: dict[str, list[Chart]] = {}
    for title, panel, names in drawn:
        curves = [_curve(run, name, buckets) for name in names]
        groups.setdefault(title, []).append(_chart(panel, curves, steps))
    return [Group(title, charts) for title, charts in groups.items()]


def not_drawn(run: RunRecord, groups: Sequence[Group]) -> list[str]:
    """Metrics that no panel names."""
    drawn = {curve.metric for group in groups for chart in group.charts for curve in chart.curves}
    return [name for name in run.series if name not in drawn]


def buckets_for(num_curves: int, max_points: int = MAX_POINTS) -> int:
    """How finely each of so many curves may be drawn."""
    return max(_MIN_BUCKETS, min(_MOST_BUCKETS, max_points // (4 * num_curves)))


def step_range(steps: list[int]) -> tuple[int, int]:
    """From the first step to the last; from 0 where that is near."""
    first, last = min(steps), max(steps)
    return (0 if last > first and first <= 0.1 * last else first), last


def value_range(values: list[float], *, may_be_log: bool) -> tuple[tuple[float, float], bool]:
    """The axis for finite values, and whether it is logarithmic."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if may_be_log and low > 0 and high / low > LOG_SCALE_RATIO:
        return (low / 1.15, high * 1.15), True
    if low >= 0 and low < 0.3 * high:
        low = 0.0  # near enough to zero to show the zero
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return (low - margin if low != 0 else low, high + margin), False


def thinned(metric: str, points: list[Point], *, max_buckets: int = MAX_BUCKETS) -> Curve:
    """A curve of few enough points, with the count of those that are no number."""
    bad = [step for step, value in points if not math.isfinite(value)]
    kept = thin(points, max_buckets=max_buckets)
    means = trend(points, max_buckets=min(max_buckets, TREND_BUCKETS))
    return Curve(metric, kept, len(points), len(bad), bad[0] if bad else None, trend=means)


def _curve(run: RunRecord, name: str, max_buckets: int) -> Curve:
    curve = thinned(name, run.series[name], max_buckets=max_buckets)
    curve.undone.extend(
        thin(series[name], max_buckets=MAX_UNDONE_BUCKETS)
        for series in run.undone
        if name in series
    )
    return curve


def _chart(panel: Panel, curves: list[Curve], steps: tuple[int, int]) -> Chart:
    values = [v for curve in curves for _, v in curve.points if math.isfinite(v)]
    y_range, log_scale = value_range(values, may_be_log=panel.log_scale)
    return Chart(panel.title, curves, log_scale, steps, y_range, panel.picture)


def get_marks(events: list[dict[str, Any]]) -> list[Mark]:
    """Marks for the events worth one, each kind at most once a step."""
    marks = {
        Mark(event["step"], event["event"], _undone_to(event))
        for event in events
        if is_marked(event) and isinstance(event.get("step"), int)
    }
    return sorted(marks, key=lambda mark: (mark.step, mark.event, mark.undone_to or 0))


def is_marked(event: dict[str, Any]) -> bool:
    """Return whether charts mark an event; by default, if its kind is not one of `UNMARKED_EVENTS`."""
    kind = event.get("event")
    return isinstance(kind, str) and _get_mark(event) != "none"


def _get_mark(event: dict[str, Any]) -> Any:
    defaults = dict.fromkeys((*UNMARKED_EVENTS, "diagnosis"), "none") | {"rollback": "span"}
    return event.get("mark", defaults.get(event["event"], "line"))


def _undone_to(event: dict[str, Any]) -> int | None:
    end = event.get("from")
    return end if _get_mark(event) == "span" and isinstance(end, int) else None
