"""Parallel coordinates: a line for each run through its parameters to a metric. Escaped HTML, no Lightning."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ..charts.axis import linear_ticks, log_ticks, tick_label
from ..charts.svg import UNITS
from ..html import words
from .runs import ComparedRun
from .values import is_finite, short_names

MAX_AXES = 9  # with the metric's
LOG_RATIO = 20.0
MAX_VALUES = 7  # so many different ones are each named on their axis


@dataclass(frozen=True)
class Axis:
    """One upright axis; `places` are fractions of its height by run, 0 at the foot."""

    title: str
    places: list[float]
    ticks: list[tuple[float, str]]  # place, words


def get_axis(title: str, values: Sequence[Any]) -> Axis:
    """Numbers by size, on a log scale where they span decades; anything else evenly, in order of appearance.

    Runs without a value meet at the foot, below the others.
    """
    known = [value for value in values if value is not None]
    if all(is_finite(value) for value in known) and len(set(known)) > 1:
        axis = _axis_of_numbers(title, [float(value) for value in known])
    else:
        axis = _axis_of_words(title, list(map(words, known)))
    if len(known) == len(values):
        return axis
    above = [_raised(place) for place in axis.places]
    rest = iter(above)
    places = [0.0 if value is None else next(rest) for value in values]
    ticks = [(0.0, "none"), *((_raised(place), word) for place, word in axis.ticks)]
    return Axis(axis.title, places, ticks)


def _raised(place: float) -> float:
    return 0.16 + 0.84 * place


def _axis_of_words(title: str, known: list[str]) -> Axis:
    different = list(dict.fromkeys(known))
    last = len(different) - 1
    place = {word: i / last if last > 0 else 0.5 for i, word in enumerate(different)}
    shown = different if len(different) <= 3 * MAX_VALUES else []
    return Axis(title, [place[word] for word in known], [(place[word], word) for word in shown])


def _axis_of_numbers(title: str, known: list[float]) -> Axis:
    low, high = min(known), max(known)
    is_log = low > 0 and high / low >= LOG_RATIO

    def place(value: float) -> float:
        if is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    different = sorted(set(known))
    if len(different) <= MAX_VALUES:
        marked = [
            v for i, v in enumerate(different) if i == 0 or _apart(place, v, different[i - 1])
        ]
    else:
        inner = log_ticks(low, high) if is_log else linear_ticks(low, high)
        marked = inner if len(inner) > 1 else [low, high]
    ticks = [(place(value), tick_label(value)) for value in marked]
    return Axis(f"{title}, log" if is_log else title, [place(value) for value in known], ticks)


def _apart(place: Any, value: float, before: float) -> bool:
    return bool(place(value) - place(before) > 0.06)


def get_axes(runs: Sequence[ComparedRun], metric: str, parameters: Sequence[str]) -> list[Axis]:
    """Those of `parameters` that differ, then others that do, then the metric."""
    differ = list(runs[0].parameters)
    chosen = [name for name in [*parameters, *differ] if name in differ]
    chosen = list(dict.fromkeys(chosen))[: MAX_AXES - 1]
    short = short_names(chosen)
    axes = [get_axis(short[name], [run.parameters[name] for run in runs]) for name in chosen]
    return [*axes, get_axis(metric, [run.values[metric] for run in runs])]


def parallel_html(
    title: str, metric: str, parameters: Sequence[str], runs: Sequence[ComparedRun]
) -> str:
    """One figure; hovering a line lights its run on the whole page. A run without a config is not in it."""
    having = [
        (number, run)
        for number, run in enumerate(runs)
        if any(value is not None for value in run.parameters.values())
    ]
    axes = get_axes([run for _, run in having], metric, parameters)
    last = len(axes) - 1
    heads = "".join(
        f'<div class="axis" style="left:{i / last:.2%}"><b>{escape(axis.title)}</b>'
        f"{_ticks(axis)}</div>"
        for i, axis in enumerate(axes)
    )
    upright = "".join(f"M{UNITS * i / last:g} 0V{UNITS}" for i in range(last + 1))
    lines = "".join(
        _line([axis.places[place] for axis in axes], number, run)
        for place, (number, run) in reversed([*enumerate(having)])  # the best on top
    )
    return (
        f'<figure class="chart parallel span6"><figcaption><b>{escape(title)}</b></figcaption>'
        f'<div class="scroll"><div class="across" style="--axes:{len(axes)}">{heads}'
        f'<svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(title)}"><path class="upright" d="{upright}"/>{lines}</svg></div></div>'
        '<p class="told" aria-live="polite">&nbsp;</p></figure>'
    )


def _ticks(axis: Axis) -> str:
    return "".join(
        f'<span style="top:{1 - place:.2%}">{escape(word)}</span>' for place, word in axis.ticks
    )


def _line(places: Sequence[float], number: int, run: ComparedRun) -> str:
    """From axis to axis: what is seen, and a broad one to point at."""
    last = len(places) - 1
    points = (f"{UNITS * i / last:g} {UNITS * (1 - p):.1f}" for i, p in enumerate(places))
    d = f"M{'L'.join(points)}"
    return (
        f'<path {run.color.attributes("thread")} data-run="{number}" d="{d}"/>'
        f'<path class="hit" data-run="{number}" d="{d}"/>'
    )
