"""Select a run's curves, thin them without losing a spike, and compute their shared axes: arithmetic on lists."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeGuard

from ..dashboard import Panel, Section
from ..run_record import Point, RunRecord, is_finite

# Lifecycle events that charts do not mark. Any other kind is marked unless the field `mark` of its record says
# otherwise, as declared by the callback that logs it; see `callbacks.events.EventKind`.
UNMARKED_EVENTS = ("start", "end", "checkpoint", "checkpoint_failed")
LOG_SCALE_RATIO = 100.0
_LARGEST = 1e300  # of an axis: beyond it, the length overflows
MAX_BUCKETS = 500
MAX_POINTS = 180_000  # for all curves of a page together: about two megabytes
MAX_ROLLED_BACK_BUCKETS = 50
MAX_TREND_BUCKETS = 250
_MIN_BUCKETS, _MAX_BUCKETS = 60, 4000


@dataclass(frozen=True)
class Curve:
    """One metric, thinned; NaN and inf are kept as points and drawn as gaps.

    Attributes:
        num_points: Number of points before thinning.
        first_not_finite: Step of the first NaN or inf; None if there is none.
        rolled_back: Points that rollbacks discarded, one list per rollback.
        trend: Means of buckets; empty if there are so few points that each is visible.
    """

    metric: str
    points: list[Point]
    num_points: int
    num_not_finite: int
    first_not_finite: int | None
    rolled_back: list[list[Point]] = field(default_factory=list)
    trend: list[Point] = field(default_factory=list)


@dataclass(frozen=True)
class Chart:
    """Curves that share axes; `y_range` is (low, high) with low < high and covers all finite values."""

    title: str
    curves: list[Curve]
    log_scale: bool
    x_range: tuple[int, int]
    y_range: tuple[float, float]
    picture: bool = False


@dataclass(frozen=True)
class Group:
    """Charts under one heading."""

    title: str
    charts: list[Chart]


@dataclass(frozen=True)
class Mark:
    """An event on the step axis; a rollback returned from `from_step` to its step."""

    step: int
    event: str
    from_step: int | None = None


def get_groups(run: RunRecord, sections: Sequence[Section]) -> list[Group]:
    """Return the run's charts by section, all on the same step axis, without empty panels and sections."""
    drawn = [
        (section.title, panel, names)
        for section in sections
        for panel in section.panels
        if panel.kind == "line" and (names := panel.metrics_among(run.series))
    ]
    drawn_series = [run.series[name] for _, _, names in drawn for name in names]
    if not drawn_series:
        return []
    steps = step_range([step for points in drawn_series for step, _ in points])
    buckets = num_buckets(len(drawn_series))
    groups: dict[str, list[Chart]] = {}
    for title, panel, names in drawn:
        curves = [_make_curve(run, name, buckets) for name in names]
        groups.setdefault(title, []).append(_make_chart(panel, curves, steps))
    return [Group(title, charts) for title, charts in groups.items()]


def metrics_not_drawn(run: RunRecord, groups: Sequence[Group]) -> list[str]:
    """Return the metrics that no panel names."""
    drawn = {curve.metric for group in groups for chart in group.charts for curve in chart.curves}
    return [name for name in run.series if name not in drawn]


def num_buckets(num_curves: int, max_points: int = MAX_POINTS) -> int:
    """Return the number of buckets per curve that keeps `num_curves` curves within `max_points`."""
    return max(_MIN_BUCKETS, min(_MAX_BUCKETS, max_points // (4 * num_curves)))


def step_range(steps: list[int]) -> tuple[int, int]:
    """Return the first and last step; the range starts at 0 if the first step is close to 0."""
    first, last = min(steps), max(steps)
    return (0 if last > first and first <= 0.1 * last else first), last


def value_range(values: list[float], *, may_be_log: bool) -> tuple[tuple[float, float], bool]:
    """Return the range of an axis and whether it is logarithmic.

    Args:
        values: Finite values; may be empty.
        may_be_log: Whether the panel allows a log scale; it is used if the values span a factor of 100.
    """
    low, high = (max(min(values), -_LARGEST), min(max(values), _LARGEST)) if values else (0.0, 1.0)
    if may_be_log and low > 0 and high / low > LOG_SCALE_RATIO:
        return (max(low / 1.15, 1 / _LARGEST), high * 1.15), True
    if low >= 0 and low < 0.3 * high:
        low = 0.0  # close enough to zero to include it
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return (low - margin if low != 0 else low, high + margin), False


def make_curve(metric: str, points: list[Point], *, max_buckets: int = MAX_BUCKETS) -> Curve:
    """Return a thinned curve; NaN and inf are counted before thinning."""
    not_finite = [step for step, value in points if not math.isfinite(value)]
    return Curve(
        metric,
        points=thin(points, max_buckets=max_buckets),
        num_points=len(points),
        num_not_finite=len(not_finite),
        first_not_finite=not_finite[0] if not_finite else None,
        trend=trend(points, max_buckets=min(max_buckets, MAX_TREND_BUCKETS)),
    )


def _make_curve(run: RunRecord, name: str, max_buckets: int) -> Curve:
    curve = make_curve(name, run.series[name], max_buckets=max_buckets)
    curve.rolled_back.extend(
        thin(series[name], max_buckets=MAX_ROLLED_BACK_BUCKETS) for series in run.rolled_back if name in series
    )
    return curve


def _make_chart(panel: Panel, curves: list[Curve], steps: tuple[int, int]) -> Chart:
    values = [v for curve in curves for _, v in curve.points if math.isfinite(v)]
    y_range, log_scale = value_range(values, may_be_log=panel.log_scale)
    return Chart(panel.title, curves, log_scale, steps, y_range, panel.picture)


def get_marks(events: list[dict[str, Any]]) -> list[Mark]:
    """Return the marks of all marked events, each kind at most once per step."""
    marks = {
        Mark(event["step"], event["event"], _from_step(event))
        for event in events
        if is_marked(event) and _is_step(event.get("step"))
    }
    return sorted(marks, key=lambda mark: (mark.step, mark.event, mark.from_step or 0))


def is_marked(event: dict[str, Any]) -> bool:
    """Return whether charts mark an event; by default, all kinds except `UNMARKED_EVENTS` are marked."""
    kind = event.get("event")
    return isinstance(kind, str) and _get_mark(event) != "none"


def _get_mark(event: dict[str, Any]) -> Any:
    defaults = dict.fromkeys((*UNMARKED_EVENTS, "diagnosis"), "none") | {"rollback": "span"}
    return event.get("mark", defaults.get(event["event"], "line"))


def _is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and is_finite(value)


def _from_step(event: dict[str, Any]) -> int | None:
    """Return the step at which an event's span ends; None if the event is not marked as a span."""
    end = event.get("from")
    return end if _get_mark(event) == "span" and _is_step(end) else None


def thin(points: list[Point], *, max_buckets: int = MAX_BUCKETS) -> list[Point]:
    """Keep at most four points per bucket (first, lowest, highest and one non-finite), and the last point.

    A spike in a single row of a hundred thousand is thus drawn at full height.
    """
    if len(points) <= 4 * max_buckets:
        return points
    buckets = pairwise(_bounds(len(points), max_buckets))
    kept = [point for first, last in buckets for point in _extremes(points[first:last])]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def trend(points: list[Point], *, max_buckets: int) -> list[Point]:
    """Return the mean of each bucket's finite values at its middle step.

    Empty if there are so few points that each is visible.
    """
    if len(points) <= 4 * max_buckets:
        return []
    means: list[Point] = []
    for first, last in pairwise(_bounds(len(points), max_buckets)):
        finite = [value for _, value in points[first:last] if math.isfinite(value)]
        if finite:
            means.append((points[(first + last) // 2][0], sum(finite) / len(finite)))
    return means


def _bounds(num_points: int, num_buckets: int) -> list[int]:
    return [round(i * num_points / num_buckets) for i in range(num_buckets + 1)]


def _extremes(bucket: list[Point]) -> list[Point]:
    finite = [i for i, (_, value) in enumerate(bucket) if math.isfinite(value)]
    chosen = {0}
    if finite:
        chosen.add(min(finite, key=lambda i: bucket[i][1]))
        chosen.add(max(finite, key=lambda i: bucket[i][1]))
    if len(finite) < len(bucket):
        chosen.add(next(i for i, (_, value) in enumerate(bucket) if not math.isfinite(value)))
    return [bucket[i] for i in sorted(chosen)]


def segments(points: list[Point]) -> list[list[Point]]:
    """Split points into line segments, at non-finite values and where a rollback returned to an earlier step."""
    found: list[list[Point]] = []
    current: list[Point] = []
    for step, value in points:
        finite = math.isfinite(value)
        if current and (not finite or step < current[-1][0]):
            found.append(current)
            current = []
        if finite:
            current.append((step, value))
    return [*found, current] if current else found


# Compute axis ticks and format labels: plain arithmetic.


def linear_ticks(low: float, high: float, *, max_ticks: int = 6) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten in [low, high], at most `max_ticks`."""
    exponent = math.floor(math.log10((high - low) / max_ticks))
    for step in (m * 10.0**e for e in (exponent, exponent + 1) for m in (1, 2, 5)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= max_ticks:
            break
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float, *, max_ticks: int = 5) -> list[float]:
    """Return powers of ten in [low, high]; every second or third one if there are too many."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / max_ticks))
    return [10.0**exponent for exponent in range(first, last + 1, stride)]


def tick_label(value: float) -> str:
    """Return a label short enough for an axis: `0`, `0.5`, `250`, `12k`, `1.5M`, `3e-4`."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e12:
        return f"{value:.3g}" if size >= 1e12 else _short_exponent(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{value / scale:.4g}{letter}"
    return f"{value:.4g}"


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return a label for each tick; all digits that differ where short labels would be equal: 0.92 and 0.9201."""
    short = [tick_label(tick) for tick in ticks]
    return short if len(set(short)) == len(short) else [f"{tick:,.9g}" for tick in ticks]


def _short_exponent(value: float) -> str:
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def value_label(value: float) -> str:
    """Return a measured value as text: five significant digits, thousands separated by commas."""
    if not is_finite(value):
        return str(value)
    if value == round(value) or abs(value) >= 1e4:
        return f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.4e}"
    return f"{value:.5g}"
