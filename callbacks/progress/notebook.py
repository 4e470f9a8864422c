"""Show progress in a notebook: a bar and a chart of the losses in the output of the cell, redrawn in place.

The last picture stays in the saved notebook. Costs about a millisecond per redraw.
"""

import base64
import html
import math
import sys
from typing import Any

BAR_CELLS = 40
MAX_POINTS = 600  # of a curve; beyond, neighbours become one point
_WIDTH, _HEIGHT = 640, 200  # of the chart, in SVG units
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 24  # margins of its axes
_COLOURS = {"train loss": "#3b82d0", "val loss": "#e07b39"}  # legible on white and on black


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook; imports nothing."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookBar:
    """A progress bar and, once there are two losses, their chart; visible from `start` on.

    Attributes:
        curves: Points (step, value) of each curve, by its name.
    """

    def __init__(self) -> None:
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self._output: Any = None  # of the cell

    def start(self) -> None:
        """Make a place in the output of the cell."""
        from IPython.display import display

        self._output = display(_as_output("", []), raw=True, display_id=True)

    def add_loss(self, name: str, step: int, value: float) -> None:
        """Add a point to the curve `train loss` or `val loss`, in the place of those of steps trained again."""
        points = self.curves.setdefault(name, [])
        while points and points[-1][0] >= step:
            points.pop()
        if math.isfinite(value):
            points.append((step, value))
        if len(points) > MAX_POINTS:  # of two neighbours the larger, so that a spike remains
            points[:] = [max(points[at : at + 2], key=lambda point: point[1]) for at in range(0, len(points), 2)]

    def draw(self, *, fraction: float | None, before: str, after: str) -> None:
        """Redraw the bar and the chart in place.

        Args:
            fraction: Completed fraction of the run, 0 to 1; None draws no bar.
            before: Text left of the bar.
            after: Text right of the bar.
        """
        parts = [before, after]
        if fraction is not None:
            done = round(min(1.0, max(0.0, fraction)) * BAR_CELLS)
            parts.insert(1, "━" * done + "─" * (BAR_CELLS - done))
        self._output.update(_as_output("  ".join(filter(None, parts)), self._chart()), raw=True)

    def stop(self) -> None:
        """Leave the last picture in the cell."""

    def _chart(self) -> list[str]:
        curves = {name: points for name, points in self.curves.items() if points}
        if sum(map(len, curves.values())) < 2:
            return []
        svg = draw_chart(curves)
        return [f'<img alt="losses" style="max-width:100%" src="data:image/svg+xml;base64,{_encode(svg)}">']


def draw_chart(curves: dict[str, list[tuple[int, float]]]) -> str:
    """Return an SVG picture of curves over the step, with a legend and the ends of both axes.

    Args:
        curves: Points (step, value) of each curve, by its name; at least one point, all finite.
    """
    steps = [step for points in curves.values() for step, _ in points]
    values = [value for points in curves.values() for _, value in points]
    first, last, low, high = min(steps), max(steps), min(values), max(values)

    def place(step: int, value: float) -> tuple[float, float]:
        x = (step - first) / max(1, last - first)
        y = (high - value) / (high - low) if high > low else 0.5
        return _LEFT + x * (_WIDTH - _LEFT - _RIGHT), _TOP + y * (_HEIGHT - _TOP - _BOTTOM)

    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"'
        f' viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="11" fill="#808080">',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#808080" stroke-opacity="0.5"/>',
        f'<text x="{_LEFT - 6}" y="{_TOP + 8}" text-anchor="end">{high:.4g}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">{low:.4g}</text>',
        f'<text x="{_LEFT}" y="{bottom + 16}">{first}</text>',
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end">step {last}</text>',
    ]
    for number, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[name]
        places = [place(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(places) < 20:  # a single point has no line
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
        legend = f'<text x="{right - 4}" y="{_TOP + 8 + 15 * number}" text-anchor="end" fill="{colour}">{name}</text>'
        parts.append(legend)
    return "".join([*parts, "</svg>"])


def _as_output(line: str, pictures: list[str]) -> dict[str, str]:
    text = f'<pre style="margin:0;white-space:pre-wrap">{html.escape(line)}</pre>'
    return {"text/plain": line, "text/html": "\n".join([text, *pictures])}


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
