"""Turn curves into figures: the data from which the page's script draws, with the legend and notes beside it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from ..run_record import Point
from .series import Chart, tick_label

NUM_COLORS = 8
MAX_LEGEND_NAMES = 8  # a longer legend is unreadable
_LABEL_WIDTH = 0.17  # of the chart, on a page of 390 pixels
_LAST_LABEL = 0.94  # its second half stays within the chart


@dataclass(frozen=True)
class Color:
    """A style sheet class; `hue`, in degrees, is set for colors of a ramp."""

    css: str
    hue: int | None = None

    @property
    def key(self) -> str | int:
        """The color as the script is given it: a hue, or the name of a class."""
        return self.css if self.hue is None else self.hue


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


class Row(NamedTuple):
    """What a reader without JavaScript sees of a curve."""

    name: str
    lowest: float | None
    highest: float | None
    last: float | None


@dataclass
class Figure:
    """One chart of a page.

    Attributes:
        data: What the script draws, see `assets/charts.js`.
        keys: Color and name of each curve in the legend.
        notes: Texts after the legend.
        span: Width in sixths of the page.
        has_table: Whether readers without JavaScript see a table of the curves.
        axes: The upright axes of a parallel coordinates plot.
        index: Index in the data of the page's script.
    """

    title: str
    data: dict[str, Any]
    keys: list[tuple[Color, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    span: int = 6
    has_table: bool = True
    axes: list[Axis] = field(default_factory=list)
    index: int = -1

    @property
    def rows(self) -> list[Row]:
        """The table for readers without JavaScript; values that are not finite are left out."""
        rows = []
        for curve in self.data["curves"] if self.has_table else ():
            known = [value for value in curve["values"] if value is not None]
            ends = (min(known), max(known), known[-1]) if known else (None, None, None)
            rows.append(Row(curve["name"], *ends))
        return rows


def get_colors(num_curves: int) -> list[Color]:
    """Return distinct colors for a few curves, or a ramp from blue to red for many."""
    if num_curves <= NUM_COLORS:
        return [Color(f"c{i}") for i in range(num_curves)]
    return [Color("ramp", round(250 - 230 * i / (num_curves - 1))) for i in range(num_curves)]


def column_spans(num_charts: int, *, leads: bool) -> list[int]:
    """Return widths, in sixths of the page, that leave no gaps in any row.

    Args:
        num_charts: Number of charts in the section.
        leads: Whether the first chart fills a row of its own.
    """
    if leads and num_charts:
        return [6, *column_spans(num_charts - 1, leads=False)]
    num_halves = {0: 0, 1: 4, 2: 2}[num_charts % 3]
    return [6] if num_charts == 1 else [3] * num_halves + [2] * (num_charts - num_halves)


def padded_range(x_range: tuple[int, int]) -> tuple[int, int]:
    """Pad a range of a single step on both sides; return any other range unchanged."""
    first, last = x_range
    return (first, last) if last > first else (first - 1, last + 1)


def packed(points: Sequence[Point]) -> dict[str, list[Any]]:
    """Encode steps as differences and values with six significant digits; NaN and inf become null."""
    steps = [step for step, _ in points]
    return {
        "steps": [b - a for a, b in zip([0, *steps], steps, strict=False)],
        "values": [short(value) for _, value in points],
    }


def short(value: float) -> float | int | None:
    """Round to six significant digits, to an int if the value is integral; None for NaN and inf."""
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.6g}")


def steps_figure(chart: Chart, *, span: int) -> Figure:
    """Return the curves of a run by step."""
    colors = get_colors(len(chart.curves))
    curves = [
        {
            "name": curve.metric,
            "color": color.key,
            **packed(curve.points),
            "rolled_back": list(map(packed, curve.rolled_back)),
            "trend": packed(curve.trend),
        }
        for curve, color in zip(chart.curves, colors, strict=True)
    ]
    keys = [(color, curve.metric) for curve, color in zip(chart.curves, colors, strict=True)]
    notes = []
    if len(keys) > MAX_LEGEND_NAMES:  # show only curves from both ends of the color ramp
        notes.append(f"{len(keys)} curves")
        keys = [*keys[:2], *keys[-1:]]
    if [name for _, name in keys] == [chart.title]:
        keys = []
    notes += ["log scale"] if chart.log_scale else []
    notes += [
        f"{curve.metric}: {curve.num_not_finite:,} of {curve.num_points:,} not finite,"
        f" first at step {curve.first_not_finite:,}"
        for curve in chart.curves
        if curve.first_not_finite is not None
    ]
    data = {"kind": "steps", "title": chart.title, "log": chart.log_scale, "curves": curves}
    return Figure(chart.title, data, keys, notes, span)


def lines_figure(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    marks: Mapping[str, float],
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """Return a few lines with optional vertical markers.

    Args:
        title: Plain text.
        lines: Points by name; non-finite points are not drawn.
        marks: x position of a vertical line by name.
        log_x: Whether the x axis is logarithmic, if all positions are positive.
        log_y: Whether the y axis is logarithmic, if all values are positive.
    """
    finite = {name: sorted(p for p in points if all(map(math.isfinite, p))) for name, points in lines.items()}
    finite = {name: points for name, points in finite.items() if points}
    colors = get_colors(len(finite))
    curves = [
        {"name": name, "color": color.key, "x": [short(x) for x, _ in points], "values": [short(y) for _, y in points]}
        for (name, points), color in zip(finite.items(), colors, strict=True)
    ]
    data = {
        "kind": "lines",
        "title": title,
        "log": log_y and all(y > 0 for points in finite.values() for _, y in points),
        "log_x": log_x and all(x > 0 for points in finite.values() for x, _ in points),
        "curves": curves,
        "marks": [[short(x), name] for name, x in marks.items()],
    }
    notes = [f"{name} {tick_label(float(f'{x:.2g}'))}" for name, x in marks.items()]
    return Figure(title, data, list(zip(colors, finite, strict=True)), notes)


def stack_figure(
    values: Mapping[str, Sequence[float]], *, places: Sequence[str], limit: float | None, unit: str
) -> Figure:
    """Return values stacked as areas, each constant until the next position, and the limit of their sum as a line.

    Args:
        values: Values at each position by name, all of equal length.
        places: Description of each position; the part before a comma labels the axis.
        limit: Maximum of the sum; None draws no line.
        unit: Unit of the values.
    """
    colors = get_colors(len(values))
    top = max([*map(sum, zip(*values.values(), strict=True)), 1e-9]) * 1.05
    if limit is not None and limit > 2 * top:
        limit = None  # a limit far above the values would flatten the chart
    data = {
        "kind": "stack",
        "title": unit,
        "log": False,
        "curves": [
            {"name": name, "color": color.key, "values": list(map(short, series))}
            for (name, series), color in zip(values.items(), colors, strict=True)
        ],
        "places": list(places),
        "labels": [[round(place, 4), word] for place, word in _place_labels(places)],
        "limit": limit,
    }
    notes = [] if limit is None else [f"dashed: {tick_label(limit)} usable"]
    return Figure(unit, data, list(zip(colors, values, strict=True)), notes)


def _place_labels(places: Sequence[str]) -> Iterator[tuple[float, str]]:
    """Yield a label, the first word, for each section of the step, at its middle, the widest first; none overlap."""
    start, sections = 0, []
    for word, group in groupby(places, key=lambda place: place.partition(",")[0]):
        length = len(list(group))
        sections.append((length, min((start + length / 2) / len(places), _LAST_LABEL), word))
        start += length
    taken: list[float] = []
    for _, middle, word in sorted(sections, reverse=True):
        if all(abs(middle - other) >= _LABEL_WIDTH for other in taken):
            taken.append(middle)
            yield middle, word
