"""Draw a parallel coordinates plot: one line per run, through its parameters to a metric. No Lightning."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from ..charts.axis import linear_ticks, log_ticks, tick_labels
from ..charts.svg import UNITS
from ..html import value_text
from .runs import ComparedRun
from .table import get_title
from .values import is_finite, short_names

MAX_AXES = 9  # including the metric's
LOG_RATIO = 20.0
MAX_LABELED_VALUES = 7  # with more distinct numbers, an axis has round ticks instead
MAX_LABELED_TEXTS = 21  # with more distinct texts, an axis has no labels
MIN_LABEL_DISTANCE = 0.06  # of the axis; closer labels would overlap
_FOOT = 0.16  # lowest position of values on an axis where some runs have none


@dataclass(frozen=True)
class Axis:
    """One vertical axis.

    Attributes:
        positions: Position of each run, from 0 at the bottom to 1 at the top.
        ticks: Pairs of position and label.
    """

    title: str
    positions: list[float]
    ticks: list[tuple[float, str]]


def get_axis(title: str, values: Sequence[Any]) -> Axis:
    """Return the axis of one parameter.

    Numbers are placed by value, on a log scale if they span a factor of 20; other values evenly, in order of first
    appearance. Runs without a value are placed at the bottom, below all others.

    Args:
        title: Name of the parameter.
        values: Its value in each run; None if the run has none.
    """
    known = [value for value in values if value is not None]
    if all(is_finite(value) for value in known) and len(set(known)) > 1:
        axis = _number_axis(title, [float(value) for value in known])
    else:
        axis = _text_axis(title, list(map(value_text, known)))
    if len(known) == len(values):
        return axis
    raised = iter([_raise(position) for position in axis.positions])
    positions = [0.0 if value is None else next(raised) for value in values]
    ticks = [(0.0, "none"), *((_raise(position), label) for position, label in axis.ticks)]
    return Axis(axis.title, positions, ticks)


def _raise(position: float) -> float:
    return _FOOT + (1 - _FOOT) * position


def _text_axis(title: str, values: list[str]) -> Axis:
    distinct = list(dict.fromkeys(values))
    last = len(distinct) - 1
    position = {text: i / last if last > 0 else 0.5 for i, text in enumerate(distinct)}
    labeled = distinct if len(distinct) <= MAX_LABELED_TEXTS else []
    ticks = [(position[text], text) for text in labeled]
    return Axis(title, [position[text] for text in values], ticks)


def _number_axis(title: str, values: list[float]) -> Axis:
    low, high = min(values), max(values)
    is_log = low > 0 and high / low >= LOG_RATIO

    def position(value: float) -> float:
        if is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    distinct = sorted(set(values))
    if len(distinct) <= MAX_LABELED_VALUES:
        labeled = distinct[:1] + [
            value for before, value in pairwise(distinct) if position(value) - position(before) > MIN_LABEL_DISTANCE
        ]
    else:
        inner = log_ticks(low, high) if is_log else linear_ticks(low, high)
        labeled = inner if len(inner) > 1 else [low, high]
    ticks = list(zip(map(position, labeled), tick_labels(labeled), strict=True))
    return Axis(f"{title} (log)" if is_log else title, [position(value) for value in values], ticks)


def get_axes(runs: Sequence[ComparedRun], metric: str, parameters: Sequence[str]) -> list[Axis]:
    """Return the axes of the given `parameters` that differ, then of other differing ones, then of the metric."""
    differing = list(runs[0].parameters)
    chosen = [name for name in [*parameters, *differing] if name in differing]
    chosen = list(dict.fromkeys(chosen))[: MAX_AXES - 1]
    short = short_names(chosen)
    axes = [get_axis(short[name], [run.parameters[name] for run in runs]) for name in chosen]
    return [*axes, get_axis(get_title(metric), [run.values[metric] for run in runs])]


def parallel_html(title: str, metric: str, parameters: Sequence[str], runs: Sequence[ComparedRun]) -> str:
    """Return one figure; hovering over a line highlights its run on the whole page.

    Args:
        title: Plain text.
        metric: Metric on the last axis.
        parameters: Config keys whose axes come first.
        runs: All runs, best first; runs without a config are not drawn.
    """
    drawn = [
        (number, run) for number, run in enumerate(runs) if any(value is not None for value in run.parameters.values())
    ]
    axes = get_axes([run for _, run in drawn], metric, parameters)
    last = len(axes) - 1
    heads = "".join(
        f'<div class="axis" style="left:{i / last:.2%}"><b title="{escape(axis.title)}">{escape(axis.title)}</b>'
        f"{_ticks_html(axis)}</div>"
        for i, axis in enumerate(axes)
    )
    verticals = "".join(f"M{UNITS * i / last:g} 0V{UNITS}" for i in range(last + 1))
    lines = "".join(
        _line([axis.positions[i] for axis in axes], number, run)
        for i, (number, run) in reversed([*enumerate(drawn)])  # draw the best run on top
    )
    return (
        f'<figure class="chart parallel span6"><figcaption><b>{escape(title)}</b></figcaption>'
        f'<div class="scroll"><div class="across" style="--axes:{len(axes)}">{heads}'
        f'<svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(title)}"><path class="upright" d="{verticals}"/>{lines}</svg></div></div>'
        '<p class="run-text" aria-live="polite">&nbsp;</p></figure>'
    )


def _ticks_html(axis: Axis) -> str:
    return "".join(f'<span style="top:{1 - position:.2%}">{escape(label)}</span>' for position, label in axis.ticks)


def _line(positions: Sequence[float], number: int, run: ComparedRun) -> str:
    """Return the visible line of a run, and a wide invisible line as hover target."""
    last = len(positions) - 1
    points = (f"{UNITS * i / last:g} {UNITS * (1 - p):.1f}" for i, p in enumerate(positions))
    d = f"M{'L'.join(points)}"
    return (
        f'<path {run.color.attributes("thread")} data-run="{number}" d="{d}"/>'
        f'<path class="hit" data-run="{number}" d="{d}"/>'
    )
