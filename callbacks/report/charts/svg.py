"""Draw a chart as HTML with inline SVG: lines stretch with the page, text keeps its size.

The drawing is an SVG of 1000 by 1000 units that stretches to its box with non-scaling strokes; all text is HTML
positioned in percent. A page thus fits phones and wide screens before any script runs; the script adds the readout
and zoom.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from ..run_record import Point
from .axis import linear_ticks, log_ticks, tick_labels
from .downsample import segments, thin
from .series import Chart, Curve, Mark

UNITS = 1000
MAX_STATIC_POINTS = 60_000  # for all curves of a page together, before zooming
MAX_STATIC_BUCKETS = 250
NUM_COLORS = 8
MAX_LEGEND_NAMES = 8  # a longer legend is unreadable


@dataclass(frozen=True)
class Color:
    """A style sheet class; `hue`, in degrees, is set for colors of a ramp."""

    css: str
    hue: int | None = None

    def attributes(self, css: str) -> str:
        """Return the HTML attributes of an element with this color and the class `css`."""
        style = "" if self.hue is None else f' style="--hue:{self.hue}"'
        return f'class="{css} {self.css}"{style}'


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


def chart_html(
    chart: Chart,
    marks: Sequence[Mark],
    *,
    index: int,
    span: int,
    max_buckets: int = MAX_STATIC_BUCKETS,
) -> str:
    """Return one `<figure>` with its curves drawn.

    Args:
        chart: What to draw.
        marks: Events, drawn as vertical lines.
        index: Index of this chart's points in the script's data.
        span: Width in sixths of the page.
        max_buckets: Maximum buckets per curve, with at most four points each.
    """
    scale = _Scale(chart)
    colors = get_colors(len(chart.curves))
    curves = "".join(
        _draw_curve(curve, scale, max_buckets, color=color) for curve, color in zip(chart.curves, colors, strict=True)
    )
    return figure(
        chart.title,
        f"{_legend(chart, colors)}{_notes(chart)}",
        index=index,
        span=span,
        drawing=f"{grid_path(map(scale.y, y_ticks(chart)))}{_draw_marks(marks, scale)}{curves}",
        axes=(
            tick_axis("y", y_ticks(chart), scale.y),
            tick_axis("x", _x_ticks(chart), scale.x),
        ),
    )


def figure(
    title: str,
    caption: str,
    *,
    index: int | None = None,
    span: int = 6,
    drawing: str = "",
    axes: tuple[str, str] = ("", ""),
) -> str:
    """Return the frame of a chart; without a drawing, the page's script draws it.

    Args:
        title: Plain text.
        caption: Escaped HTML after the title.
        index: Index of this chart's points in the script's data, with steps as x axis; None if there is only the
            drawing.
        span: Width in sixths of the page.
        drawing: SVG elements.
        axes: Escaped HTML of the labels of the y axis and the x axis.
    """
    data, label, tools = "", f'aria-label="{escape(title)}"', ""
    if index is not None:
        data, label = f' data-chart="{index}"', f'tabindex="0" aria-label="{escape(title)} by step"'
        tools = "".join(f'<div class="{name}" hidden></div>' for name in ("cursor", "brush", "readout"))
    return (
        f'<figure class="chart span{span}"{data}>'
        f"<figcaption><b>{escape(title)}</b>{caption}</figcaption>"
        f'<div class="plot"><div class="ys">{axes[0]}</div><div class="xs">{axes[1]}</div>'
        f'<svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" role="img" {label}>'
        f"{drawing}</svg>{tools}</div></figure>"
    )


def axis_labels(css: str, labels: Iterable[tuple[float, str]]) -> str:
    """Return the labels of an axis as escaped HTML.

    Args:
        css: `y` or `x`.
        labels: Pairs of position and text; positions run from 0 to 1, from the top or from the left.
    """
    side = {"y": "top", "x": "left"}[css]
    return "".join(f'<span class="{css}" style="{side}:{place:.2%}">{escape(text)}</span>' for place, text in labels)


def tick_axis(css: str, ticks: Sequence[float], place: Callable[[float], float]) -> str:
    """Return the labels of an axis as escaped HTML.

    Args:
        css: `y` or `x`.
        ticks: Values on the axis.
        place: Returns the position of a value in SVG units.
    """
    return axis_labels(css, zip((place(tick) / UNITS for tick in ticks), tick_labels(ticks), strict=True))


def grid_path(heights: Iterable[float]) -> str:
    """Return horizontal lines at these heights, in SVG units from the top."""
    return f'<path class="grid" d="{"".join(f"M0 {height:g}H{UNITS}" for height in heights)}"/>'


class _Scale:
    """Maps step and value to SVG units; y runs downwards."""

    def __init__(self, chart: Chart) -> None:
        self.first, self.last = padded_range(chart.x_range)
        self._log = chart.log_scale
        self._low, self._high = (self._transform(value) for value in chart.y_range)

    def _transform(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self._log else value

    def x(self, step: float) -> float:
        return round(UNITS * (step - self.first) / (self.last - self.first), 1)

    def y(self, value: float) -> float:
        """Return the y coordinate, clipped to nine times the height: outside the box, but drawable in browsers."""
        fraction = (self._transform(value) - self._low) / (self._high - self._low)
        return round(UNITS * (1 - min(9.0, max(-9.0, fraction))), 1)


def padded_range(x_range: tuple[int, int]) -> tuple[int, int]:
    """Pad a range of a single step on both sides; return any other range unchanged."""
    first, last = x_range
    return (first, last) if last > first else (first - 1, last + 1)


def y_ticks(chart: Chart) -> list[float]:
    """Return powers of ten on a log axis that shows at least two of them, else round numbers."""
    powers = log_ticks(*chart.y_range) if chart.log_scale else []
    return powers if len(powers) > 1 else linear_ticks(*chart.y_range)


def _draw_curve(curve: Curve, scale: _Scale, max_buckets: int, *, color: Color) -> str:
    """Return the lines of a curve, and its isolated points as zero-length lines that round caps turn into dots."""
    rolled_back = [line for points in curve.rolled_back for line in segments(points)]
    lines = segments(thin(curve.points, max_buckets=max_buckets))
    # a curve with a trend is noise around it and is drawn faintly
    css = "curve noisy" if curve.trend else "curve"
    layers = (("rolled-back", rolled_back), (css, lines), ("trend", segments(curve.trend)))
    paths = [
        (f"{layer}{suffix}", path)
        for layer, layer_lines in layers
        for suffix, path in zip(("", " dots"), _paths(layer_lines, scale), strict=True)
    ]
    return "".join(f'<path {color.attributes(css)} d="{path}"/>' for css, path in paths if path)


def _paths(segments_: list[list[Point]], scale: _Scale) -> tuple[str, str]:
    """Return the path data of lines and of isolated points."""
    lines, dots = [], []
    for segment in segments_:
        head, *rest = (f"{scale.x(step):g} {scale.y(value):g}" for step, value in segment)
        if rest:
            lines.append(f"M{head}L{' '.join(rest)}")
        else:
            dots.append(f"M{head}h0")
    return "".join(lines), "".join(dots)


def _draw_marks(marks: Sequence[Mark], scale: _Scale) -> str:
    """Return a path per kind of event: a line at each step, and a band over rolled-back steps."""
    drawn = []
    for event in sorted({mark.event for mark in marks}):
        same_kind = [mark for mark in marks if mark.event == event]
        bands = {(scale.x(m.step), scale.x(m.from_step)) for m in same_kind if m.from_step}
        path = "".join(f"M{a:g} 0H{b:g}V{UNITS}H{a:g}Z" for a, b in sorted(bands))
        if path:
            drawn.append(f'<path class="band e-{escape(event)}" d="{path}"/>')
        positions = sorted({scale.x(mark.step) for mark in same_kind})
        path = "".join(f"M{x:g} 0V{UNITS}" for x in positions if 0 <= x <= UNITS)
        if path:
            drawn.append(f'<path class="mark e-{escape(event)}" d="{path}"/>')
    return "".join(drawn)


def _x_ticks(chart: Chart) -> list[float]:
    first, last = chart.x_range
    return [t for t in linear_ticks(first, last) if t == int(t)] if last > first else [first]


def _legend(chart: Chart, colors: list[Color]) -> str:
    """Return the legend of curve names; empty if the only name is already the title."""
    if len(chart.curves) == 1 and chart.curves[0].metric == chart.title:
        return ""
    named = list(zip(chart.curves, colors, strict=True))
    note = ""
    if len(named) > MAX_LEGEND_NAMES:  # show only curves from both ends of the color ramp
        note = f'<span class="note">{len(named)} curves</span>'
        named = [*named[:2], *named[-1:]]
    names = "".join(f"<span {color.attributes('key')}>{escape(curve.metric)}</span>" for curve, color in named)
    return names + note


def _notes(chart: Chart) -> str:
    """Return notes on a log scale and on non-finite values."""
    notes = ["log scale"] if chart.log_scale else []
    notes += [
        f"{curve.metric}: {curve.num_not_finite:,} of {curve.num_points:,} not finite,"
        f" first at step {curve.first_not_finite:,}"
        for curve in chart.curves
        if curve.first_not_finite is not None
    ]
    return "".join(f'<span class="note">{escape(note)}</span>' for note in notes)
