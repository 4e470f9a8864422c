"""Draw a run's charts as one PNG with matplotlib, imported only when needed; takes about a second."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...files import replacing
from .series import Chart, Curve, Mark, segments, tick_label, tick_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import Formatter

# Okabe and Ito's colorblind-safe palette: https://jfly.uni-koeln.de/color/
CURVE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
MAX_LEGEND_NAMES = 12  # a longer legend would cover the curves
INK, GRID, MARK = "#333333", "#e6e6e6", "#b07d00"


def write_png(path: Path, *, title: str, charts: Sequence[Chart], marks: Sequence[Mark]) -> None:
    """Write the charts, two per row and the first across the full width, as a PNG 1650 pixels wide.

    Args:
        path: File to write, atomically: a reader finds either the old picture or the new one.
        title: Title of the picture.
        charts: At least one.
        marks: Events, drawn in every chart.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = 1 + len(charts) // 2
    figure = Figure(figsize=(11, 1.1 + 2.9 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    # a dollar sign would start mathtext
    figure.suptitle(title.replace("$", r"\$"), x=0.02, ha="left", fontsize=13, color=INK)
    grid = figure.add_gridspec(num_rows, 2)
    for i, chart in enumerate(charts):
        row, column = divmod(i + 1, 2)
        fills_row = i == 0 or (i == len(charts) - 1 and column == 0)
        cell = grid[row, :] if fills_row else grid[row, column]
        _draw_chart(figure.add_subplot(cell), chart, marks)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=150, format="png")


def _draw_chart(axes: Axes, chart: Chart, marks: Sequence[Mark]) -> None:
    for curve, color in zip(chart.curves, cycle(CURVE_COLORS), strict=False):
        _draw_curve(axes, curve, color)
    for step in sorted({mark.step for mark in marks}):
        axes.axvline(step, color=MARK, lw=0.8, ls=(0, (3, 3)), zorder=0)
    _style_axes(axes, chart)


def _draw_curve(axes: Axes, curve: Curve, color: str) -> None:
    """Draw a curve; if it has a trend, draw its points faintly behind the trend."""
    label: str | None = curve.metric
    faint: dict[str, Any] = {"lw": 0.7, "alpha": 0.35} if curve.trend else {"lw": 1.4}
    for lines, style in ((segments(curve.trend), {"lw": 1.5}), (segments(curve.points), faint)):
        for line in lines:
            steps, values = zip(*line, strict=True)
            dot = "o" if len(line) == 1 else None
            axes.plot(steps, values, color=color, marker=dot, ms=4, label=label, **style)
            label = None  # only one legend entry per curve


def _label_ticks() -> Formatter:
    from matplotlib.ticker import FuncFormatter

    formatter: Any = FuncFormatter(lambda value, _: tick_label(value))
    formatter.format_ticks = lambda values: tick_labels([*map(float, values)])
    made: Formatter = formatter
    return made


def _style_axes(axes: Axes, chart: Chart) -> None:
    """Set labels, limits, a faint grid and no frame."""
    if chart.log_scale:
        axes.set_yscale("log")
    axes.set_ylim(*chart.y_range)
    first, last = chart.x_range
    pad = 0.01 * (last - first) or 1
    axes.set_xlim(first - pad, last + pad)
    axes.set_title(chart.title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel("step", fontsize=9, color=INK)
    for axis in (axes.xaxis, axes.yaxis) if not chart.log_scale else (axes.xaxis,):
        axis.set_major_formatter(_label_ticks())
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.grid(color=GRID, lw=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    if 1 < len(chart.curves) <= MAX_LEGEND_NAMES and any(segments(curve.points) for curve in chart.curves):
        axes.legend(frameon=False, fontsize=8)
