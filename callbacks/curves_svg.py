"""A chart as HTML and inline SVG: lines stretch with the page, letters keep their size.

The drawing is an SVG of 1000 by 1000 units that stretches to its box, with strokes that do not
stretch; everything that has letters is HTML at a position in percent. So one page fits a phone and
a wide screen without a script having to draw anything.
"""

import json
import math
from html import escape

from callbacks.axis import linear_ticks, log_ticks, tick_label
from callbacks.curves import Chart, Curve, Mark

UNITS = 1000


def chart_html(chart: Chart, marks: list[Mark], *, index: int) -> str:
    """One `<figure>`; the script of the page finds its points by `index`."""
    scale = _Scale(chart)
    lines = "".join(_curve(curve, scale, css=f"c{i}") for i, curve in enumerate(chart.curves))
    return (
        f'<figure class="chart" data-chart="{index}">'
        f"<figcaption><b>{escape(chart.title)}</b>{_legend(chart)}{_note(chart)}</figcaption>"
        f'<div class="plot">{_y_axis(chart, scale)}{_x_axis(chart, scale)}'
        f'<svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(chart.title)} over step">'
        f"{_grid(chart, scale)}{_marks(marks, scale)}{lines}"
        '<path class="cursor" d=""/></svg><div class="readout" hidden></div></div></figure>'
    )


class _Scale:
    """Step and value to SVG units; y runs downwards."""

    def __init__(self, chart: Chart) -> None:
        first, last = chart.x_range
        pad = 0 if last > first else 1
        self.first, self.last = first - pad, last + pad
        self._log = chart.log_scale
        self._low, self._high = (self._y(value) for value in chart.y_range)

    def _y(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def x(self, step: float) -> float:
        return round(UNITS * (step - self.first) / (self.last - self.first), 1)

    def y(self, value: float) -> float:
        fraction = (self._y(value) - self._low) / (self._high - self._low)
        return round(UNITS * (1 - fraction), 1)


def y_ticks(chart: Chart) -> list[float]:
    """Powers of ten on a logarithmic axis that shows two of them, else round numbers."""
    powers = log_ticks(*chart.y_range) if chart.log_scale else []
    return powers if len(powers) > 1 else linear_ticks(*chart.y_range)


def _curve(curve: Curve, scale: _Scale, *, css: str) -> str:
    """The lines, and the points that stand alone: lines of no length, which round caps make dots."""
    lines, dots = [], []
    for segment in curve.segments():
        head, *rest = (f"{scale.x(step):g} {scale.y(value):g}" for step, value in segment)
        if rest:
            lines.append(f"M{head}L{' '.join(rest)}")
        else:
            dots.append(f"M{head}h0")
    paths = [("curve", lines), ("curve dots", dots)]
    return "".join(f'<path class="{kind} {css}" d="{"".join(d)}"/>' for kind, d in paths if d)


def _grid(chart: Chart, scale: _Scale) -> str:
    path = "".join(f"M0 {scale.y(tick):g}H{UNITS}" for tick in y_ticks(chart))
    return f'<path class="grid" d="{path}"/>'


def _marks(marks: list[Mark], scale: _Scale) -> str:
    """A line for each place on the axis that has marks; its name shows in the read-out."""
    places = sorted({scale.x(mark.step) for mark in marks})
    path = "".join(f"M{x:g} 0V{UNITS}" for x in places if 0 <= x <= UNITS)
    return f'<path class="mark" d="{path}"/>' if path else ""


def _y_axis(chart: Chart, scale: _Scale) -> str:
    return "".join(
        f'<span class="y" style="top:{scale.y(tick) / UNITS:.2%}">{tick_label(tick)}</span>'
        for tick in y_ticks(chart)
    )


def _x_axis(chart: Chart, scale: _Scale) -> str:
    first, last = chart.x_range
    ticks = [t for t in linear_ticks(first, last) if t == int(t)] if last > first else [first]
    labels = "".join(
        f'<span class="x" style="left:{scale.x(tick) / UNITS:.2%}">{tick_label(tick)}</span>'
        for tick in ticks
    )
    return labels + '<span class="x-name">step</span>'


def _legend(chart: Chart) -> str:
    return "".join(
        f'<span class="key c{i}">{escape(curve.metric)}</span>'
        for i, curve in enumerate(chart.curves)
    )


def _note(chart: Chart) -> str:
    notes = ["log scale"] if chart.log_scale else []
    notes += [
        f"{curve.metric}: {curve.num_not_finite:,} of {curve.num_points:,} not finite,"
        f" first at step {curve.first_not_finite:,}"
        for curve in chart.curves
        if curve.first_not_finite is not None
    ]
    return "".join(f'<span class="note">{escape(note)}</span>' for note in notes)


def points_json(charts: list[Chart], marks: list[Mark]) -> str:
    """The read-out's points; `<` is spelled so that no text can end the script element."""
    data = {
        "charts": [
            {
                "first": chart.x_range[0] - (chart.x_range[0] == chart.x_range[1]),
                "last": chart.x_range[1] + (chart.x_range[0] == chart.x_range[1]),
                "curves": [
                    {
                        "metric": curve.metric,
                        "points": [
                            [step, float(f"{value:.6g}") if math.isfinite(value) else None]
                            for step, value in curve.points
                        ],
                    }
                    for curve in chart.curves
                ],
            }
            for chart in charts
        ],
        "marks": [[mark.step, mark.event] for mark in marks],
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
