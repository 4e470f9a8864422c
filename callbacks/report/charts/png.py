"""The run in one picture: matplotlib without pyplot, about a second, imported when it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .axis import tick_label
from .downsample import segments
from .series import Chart, Curve, Mark

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart with every kind of color vision: https://jfly.uni-koeln.de/color/
CURVE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
MAX_KEYS = 12  # a longer legend would cover the curves
INK, GRID, MARK = "#333333", "#e6e6e6", "#b07d00"


def write_png(path: Path, *, title: str, charts: Sequence[Chart], marks: Sequence[Mark]) -> None:
    """Two charts a row, the first over the whole width; 1650 pixels wide."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = 1 + len(charts) // 2
    figure = Figure(figsize=(11, 1.1 + 2.9 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title.replace("$", r"\$"), x=0.02, ha="left", fontsize=13, color=INK)
    grid = figure.add_gridspec(num_rows, 2)
    for i, chart in enumerate(charts):
        row, column = divmod(i + 1, 2)
        alone = i == 0 or (i == len(charts) - 1 and column == 0)
        cell = grid[row, :] if alone else grid[row, column]
        _draw(figure.add_subplot(cell), chart, marks)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=150, format="png")
    partial.replace(path)


def _draw(axes: Axes, chart: Chart, marks: Sequence[Mark]) -> None:
    for curve, color in zip(chart.curves, cycle(CURVE_COLORS), strict=False):
        _draw_curve(axes, curve, color)
    for step in sorted({mark.step for mark in marks}):
        axes.axvline(step, color=MARK, lw=0.8, ls=(0, (3, 3)), zorder=0)
    _dress(axes, chart)


def _draw_curve(axes: Axes, curve: Curve, color: str) -> None:
    """Its points; of many, faintly under their trend."""
    label: str | None = curve.metric
    faint: dict[str, Any] = {"lw": 0.7, "alpha": 0.35} if curve.trend else {"lw": 1.4}
    for stretches, style in ((segments(curve.trend), {"lw": 1.5}), (curve.segments(), faint)):
        for stretch in stretches:
            steps, values = zip(*stretch, strict=True)
            dot = "o" if len(stretch) == 1 else None
            axes.plot(steps, values, color=color, marker=dot, ms=4, label=label, **style)
            label = None


def _dress(axes: Axes, chart: Chart) -> None:
    """Labels, limits, and as few lines as will do."""
    if chart.log_scale:
        axes.set_yscale("log")
    axes.set_ylim(*chart.y_range)
    first, last = chart.x_range
    pad = 0.01 * (last - first) or 1
    axes.set_xlim(first - pad, last + pad)
    axes.set_title(chart.title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel("step", fontsize=9, color=INK)
    axes.xaxis.set_major_formatter(lambda x, _: tick_label(x))
    if not chart.log_scale:
        axes.yaxis.set_major_formatter(lambda y, _: tick_label(y))
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.grid(color=GRID, lw=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    if 1 < len(chart.curves) <= MAX_KEYS and any(curve.segments() for curve in chart.curves):
        axes.legend(frameon=False, fontsize=8)
