"""Which curves a run has, and few enough points of them to draw: plain arithmetic on lists."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from callbacks.run_record import Point, RunRecord

# Events worth a mark on the step axis; the others are in the page's table only.
MARKED_EVENTS = frozenset(
    {
        "resume",
        "checkpoint_refused",
        "spike",
        "skip",
        "rollback",
        "lr_cut",
        "preempted",
        "oom",
        "stop",
    }
)
MAX_BUCKETS = 500
LOG_SCALE_RATIO = 100.0

# title, metric names in the order of their curves, may a wide range make the axis logarithmic
_CHARTS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    (
        "loss",
        ("train/loss", "val/loss", "train_loss", "train_loss_step", "val_loss", "loss"),
        True,
    ),
    ("accuracy", ("train/accuracy", "val/accuracy", "train_acc", "val_acc"), False),
    ("learning rate", ("lr",), False),
    ("gradient norm", ("grad/norm",), True),
    ("tokens per second", ("throughput/tokens_per_second",), False),
    ("samples per second", ("throughput/samples_per_second",), False),
    ("seconds per step", ("time/step_seconds",), False),
)
_SPEED = ("tokens per second", "samples per second", "seconds per step")  # the first there is


@dataclass(frozen=True)
class Curve:
    """One metric, thinned. NaN and infinite values are points too: a line has a gap there."""

    metric: str
    points: list[Point]
    num_points: int  # before thinning
    num_not_finite: int
    first_not_finite: int | None  # step

    def segments(self) -> list[list[Point]]:
        """The stretches to draw as one line: broken at gaps, and where a rollback went back."""
        segments: list[list[Point]] = []
        current: list[Point] = []
        for step, value in self.points:
            finite = math.isfinite(value)
            if current and (not finite or step < current[-1][0]):
                segments.append(current)
                current = []
            if finite:
                current.append((step, value))
        return [*segments, current] if current else segments


@dataclass(frozen=True)
class Chart:
    """Curves that share their axes."""

    title: str
    curves: list[Curve]
    log_scale: bool
    x_range: tuple[int, int]
    y_range: tuple[float, float]  # of the finite values; low < high


@dataclass(frozen=True)
class Mark:
    """An event on the step axis."""

    step: int
    event: str


def charts_of(run: RunRecord) -> list[Chart]:
    """The run's charts, loss first, all over the same steps; one of the three kinds of speed."""
    drawn = [points for _, names, _ in _CHARTS for n in names if (points := run.series.get(n))]
    steps = [step for points in drawn for step, _ in points]
    charts: list[Chart] = []
    for title, names, may_be_log in _CHARTS:
        if title in _SPEED and any(chart.title in _SPEED for chart in charts):
            continue
        curves = [thinned(name, run.series[name]) for name in names if name in run.series]
        if curves:
            charts.append(_chart(title, curves, may_be_log, _step_range(steps)))
    return charts


def _step_range(steps: list[int]) -> tuple[int, int]:
    """From the first step to the last; from 0 where that is near."""
    first, last = min(steps), max(steps)
    return (0 if last > first and first <= 0.1 * last else first), last


def _chart(title: str, curves: list[Curve], may_be_log: bool, steps: tuple[int, int]) -> Chart:
    values = [v for curve in curves for _, v in curve.points if math.isfinite(v)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    log_scale = may_be_log and low > 0 and high / low > LOG_SCALE_RATIO
    if log_scale:
        low, high = low / 1.15, high * 1.15
    else:
        if low >= 0 and low < 0.3 * high:
            low = 0.0  # near enough to zero to show the zero
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
        low, high = (low - margin if low != 0 else low), high + margin
    return Chart(title, curves, log_scale, steps, (low, high))


def thinned(metric: str, points: list[Point]) -> Curve:
    """At most four points for each of 500 buckets: first, lowest, highest, one not finite.

    So a spike of a single row in a hundred thousand is drawn as high as it was.
    """
    bad = [step for step, value in points if not math.isfinite(value)]
    kept = points
    if len(points) > 4 * MAX_BUCKETS:
        bounds = [round(i * len(points) / MAX_BUCKETS) for i in range(MAX_BUCKETS + 1)]
        kept = [point for a, b in pairwise(bounds) for point in _telling(points[a:b])]
        kept.append(points[-1])
    return Curve(metric, kept, len(points), len(bad), bad[0] if bad else None)


def _telling(bucket: list[Point]) -> list[Point]:
    finite = [i for i, (_, value) in enumerate(bucket) if math.isfinite(value)]
    chosen = {0}
    if finite:
        chosen.add(min(finite, key=lambda i: bucket[i][1]))
        chosen.add(max(finite, key=lambda i: bucket[i][1]))
    if len(finite) < len(bucket):
        chosen.add(next(i for i, (_, value) in enumerate(bucket) if not math.isfinite(value)))
    return [bucket[i] for i in sorted(chosen)]


def marks_of(events: list[dict[str, Any]]) -> list[Mark]:
    """Marks for the events worth one, each kind at most once a step."""
    marks = {
        Mark(event["step"], event["event"])
        for event in events
        if event.get("event") in MARKED_EVENTS and isinstance(event.get("step"), int)
    }
    return sorted(marks, key=lambda mark: (mark.step, mark.event))
