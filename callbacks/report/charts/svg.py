"""A chart as HTML and inline SVG: lines stretch with the page, letters keep their size.

The drawing is an SVG of 1000 by 1000 units that stretches to its box, with strokes that do not
stretch; everything that has letters is HTML at a position in percent. So one page fits a phone and
a wide screen without a script having to draw anything; the script adds the read-out and the zoom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..run_record import Point
from .axis import linear_ticks, log_ticks, tick_label
from .downsample import segments, thin
from .series import Chart, Curve, Mark

UNITS = 1000
STILL_POINTS = 60_000  # of all curves together: what is drawn before anybody zooms
STILL_BUCKETS = 250
NUM_COLORS = 8
MAX_KEYS = 8  # a legend of more names than these is a legend nobody reads


def chart_html(
    chart: Chart, marks: Sequence[Mark], *, index: int, span: int, max_buckets: int = STILL_BUCKETS
) -> str:
    """One `<figure>`; the script of the page finds its points by `index`. `span` is of six columns."""
    scale = _Scale(chart)
    colors = get_colors(len(chart.curves))
    lines = "".join(
        _curve(curve, scale, max_buckets, color=color)
        for curve, color in zip(chart.curves, colors, strict=True)
    )
    caption = f"{_legend(chart, colors)}{_note(chart)}"
    drawing = f"{_grid(chart, scale)}{_marks(marks, scale)}{lines}"
    axes = _y_axis(chart, scale), _x_axis(chart, scale)
    return figure(chart.title, caption, index=index, span=span, drawing=drawing, axes=axes)


def figure(
    title: str,
    caption: str,
    *,
    index: int,
    span: int,
    drawing: str = "",
    axes: tuple[str, str] = ("", ""),
) -> str:
    """A chart's frame; one without a drawing is drawn by the script. `caption` and all else are escaped."""
    return (
        f'<figure class="chart span{span}" data-chart="{index}">'
        f"<figcaption><b>{escape(title)}</b>{caption}</figcaption>"
        f'<div class="plot"><div class="ys">{axes[0]}</div><div class="xs">{axes[1]}</div>'
        f'<svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" role="img" tabindex="0"'
        f' aria-label="{escape(title)} over step">{drawing}</svg>'
        '<div class="cursor" hidden></div><div class="brush" hidden></div>'
        '<div class="readout" hidden></div></div></figure>'
    )


@dataclass(frozen=True)
class Color:
    """A class of the style sheet; and of a ramp of many, where on the color wheel."""

    css: str
    hue: int | None = None

    def attributes(self, css: str) -> str:
        """For an element that also has the class `css`."""
        style = "" if self.hue is None else f' style="--hue:{self.hue}"'
        return f'class="{css} {self.css}"{style}'


def get_colors(num_curves: int) -> list[Color]:
    """Colors to tell a few apart, or to show many in their order, from blue to red."""
    if num_curves <= NUM_COLORS:
        return [Color(f"c{i}") for i in range(num_curves)]
    return [Color("ramp", round(250 - 230 * i / (num_curves - 1))) for i in range(num_curves)]


def spans(num_charts: int, *, leads: bool) -> list[int]:
    """Widths in sixths of the page that leave no hole; the first alone in its row where it leads."""
    if leads and num_charts:
        return [6, *spans(num_charts - 1, leads=False)]
    halves = {0: 0, 1: 4, 2: 2}[num_charts % 3]
    return [6] if num_charts == 1 else [3] * halves + [2] * (num_charts - halves)


class _Scale:
    """Step and value to SVG units; y runs downwards."""

    def __init__(self, chart: Chart) -> None:
        self.first, self.last = padded(chart.x_range)
        self._log = chart.log_scale
        self._low, self._high = (self._y(value) for value in chart.y_range)

    def _y(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self._log else value

    def x(self, step: float) -> float:
        return round(UNITS * (step - self.first) / (self.last - self.first), 1)

    def y(self, value: float) -> float:
        fraction = (self._y(value) - self._low) / (self._high - self._low)
        return round(UNITS * (1 - min(9.0, max(-9.0, fraction))), 1)


def padded(x_range: tuple[int, int]) -> tuple[int, int]:
    """A range of one step, with room on both sides; any other as it is."""
    first, last = x_range
    return (first, last) if last > first else (first - 1, last + 1)


def y_ticks(chart: Chart) -> list[float]:
    """Powers of ten on a logarithmic axis that shows two of them, else round numbers."""
    powers = log_ticks(*chart.y_range) if chart.log_scale else []
    return powers if len(powers) > 1 else linear_ticks(*chart.y_range)


def _curve(curve: Curve, scale: _Scale, max_buckets: int, *, color: Color) -> str:
    """The lines, and the points that stand alone: lines of no length, which round caps make dots."""
    undone = [stretch for points in curve.undone for stretch in segments(points)]
    kept = segments(thin(curve.points, max_buckets=max_buckets))
    paths = [
        (f"{kind}{dots}", d)
        for kind, stretches in (
            ("undone", undone),
            (_kind(curve), kept),
            ("trend", segments(curve.trend)),
        )
        for dots, d in zip(("", " dots"), _paths(stretches, scale), strict=True)
    ]
    return "".join(f'<path {color.attributes(css)} d="{d}"/>' for css, d in paths if d)


def _kind(curve: Curve) -> str:
    """A curve with a trend over it is drawn faintly: it is a band of noise."""
    return "curve noisy" if curve.trend else "curve"


def _paths(stretches: list[list[Point]], scale: _Scale) -> tuple[str, str]:
    lines, dots = [], []
    for stretch in stretches:
        head, *rest = (f"{scale.x(step):g} {scale.y(value):g}" for step, value in stretch)
        if rest:
            lines.append(f"M{head}L{' '.join(rest)}")
        else:
            dots.append(f"M{head}h0")
    return "".join(lines), "".join(dots)


def _grid(chart: Chart, scale: _Scale) -> str:
    path = "".join(f"M0 {scale.y(tick):g}H{UNITS}" for tick in y_ticks(chart))
    return f'<path class="grid" d="{path}"/>'


def _marks(marks: Sequence[Mark], scale: _Scale) -> str:
    """A line for each place on the axis that has marks of a kind, a band where steps were undone."""
    drawn = []
    for event in sorted({mark.event for mark in marks}):
        of_kind = [mark for mark in marks if mark.event == event]
        bands = {(scale.x(m.step), scale.x(m.undone_to)) for m in of_kind if m.undone_to}
        path = "".join(f"M{a:g} 0H{b:g}V{UNITS}H{a:g}Z" for a, b in sorted(bands))
        if path:
            drawn.append(f'<path class="band e-{escape(event)}" d="{path}"/>')
        places = sorted({scale.x(mark.step) for mark in of_kind})
        path = "".join(f"M{x:g} 0V{UNITS}" for x in places if 0 <= x <= UNITS)
        if path:
            drawn.append(f'<path class="mark e-{escape(event)}" d="{path}"/>')
    return "".join(drawn)


def _y_axis(chart: Chart, scale: _Scale) -> str:
    return "".join(
        f'<span class="y" style="top:{scale.y(tick) / UNITS:.2%}">{tick_label(tick)}</span>'
        for tick in y_ticks(chart)
    )


def _x_axis(chart: Chart, scale: _Scale) -> str:
    first, last = chart.x_range
    ticks = [t for t in linear_ticks(first, last) if t == int(t)] if last > first else [first]
    return "".join(
        f'<span class="x" style="left:{scale.x(tick) / UNITS:.2%}">{tick_label(tick)}</span>'
        for tick in ticks
    )


def _legend(chart: Chart, colors: list[Color]) -> str:
    if len(chart.curves) == 1 and chart.curves[0].metric == chart.title:
        return ""
    shown = list(zip(chart.curves, colors, strict=True))
    left_out = len(shown) - MAX_KEYS
    if left_out > 0:  # the first and the last: what lies between is between them in color too
        shown = [*shown[:2], *shown[-1:]]
    keys = "".join(
        f"<span {color.attributes('key')}>{escape(curve.metric)}</span>" for curve, color in shown
    )
    count = f'<span class="note">{len(chart.curves)} curves</span>' if left_out > 0 else ""
    return keys + count


def _note(chart: Chart) -> str:
    notes = ["log scale"] if chart.log_scale else []
    notes += [
        f"{curve.metric}: {curve.num_not_finite:,} of {curve.num_points:,} not finite,"
        f" first at step {curve.first_not_finite:,}"
        for curve in chart.curves
        if curve.first_not_finite is not None
    ]
    return "".join(f'<span class="note">{escape(note)}</span>' for note in notes)
