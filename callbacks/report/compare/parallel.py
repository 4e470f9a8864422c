"""Place runs in a parallel coordinates plot: one line each, through its parameters to a metric. No Lightning."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..charts.axis import linear_ticks, log_ticks, tick_labels
from ..charts.figures import Axis, Figure
from ..html import value_text
from ..run_record import is_finite
from .runs import ComparedRun
from .table import get_title
from .values import short_names

MAX_AXES = 9  # including the metric's
LOG_RATIO = 20.0
MAX_LABELED_VALUES = 7  # with more distinct numbers, an axis has round ticks instead
MAX_LABELED_TEXTS = 21  # with more distinct texts, an axis has no labels
MIN_LABEL_DISTANCE = 0.06  # of the axis; closer labels would overlap
_FOOT = 0.16  # lowest position of values on an axis where some runs have none


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


def parallel_figure(title: str, metric: str, parameters: Sequence[str], runs: Sequence[ComparedRun]) -> Figure:
    """Return a figure whose data is a line per run, and the axes through which they go.

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
    lines = zip(*([round(position, 4) for position in axis.positions] for axis in axes), strict=True)
    curves = [
        {"run": number, "name": run.name, "color": run.color.key, "values": line}
        for (number, run), line in zip(drawn, lines, strict=True)
    ]
    data = {"kind": "parallel", "title": title, "log": False, "curves": curves}
    return Figure(title, data, has_table=False, axes=axes)
