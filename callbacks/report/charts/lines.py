"""Draw a few lines with optional vertical markers on linear or logarithmic axes, as resizable inline SVG."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from .axis import linear_ticks, log_ticks, tick_label
from .svg import UNITS, figure, get_colors, grid_path, tick_axis

Points = Sequence[tuple[float, float]]


def lines_figure(
    title: str, lines: Mapping[str, Points], *, marks: Mapping[str, float], log_x: bool = False, log_y: bool = False
) -> str:
    """Return one `<figure>`.

    Args:
        title: Plain text.
        lines: Points by name; non-finite points are not drawn.
        marks: x position of a vertical line by name.
        log_x: Whether the x axis is logarithmic.
        log_y: Whether the y axis is logarithmic.
    """
    finite = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in lines.items()}
    finite = {name: points for name, points in finite.items() if points}
    xs = [x for points in finite.values() for x, _ in points]
    ys = [y for points in finite.values() for _, y in points]
    if not xs:
        return f'<figure class="chart span6"><figcaption><b>{escape(title)}</b></figcaption></figure>'
    across, up = _Axis(xs, is_log=log_x), _Axis(ys, is_log=log_y)
    drawn, keys = [grid_path(UNITS - up.place(tick) for tick in up.ticks())], []
    for (name, points), color in zip(finite.items(), get_colors(len(finite)), strict=True):
        path = "L".join(f"{across.place(x)} {round(UNITS - up.place(y), 1)}" for x, y in points)
        single = ("curve dots", "h0") if len(points) == 1 else ("curve", "")  # round caps draw it as a dot
        drawn.append(f'<path {color.attributes(single[0])} d="M{path}{single[1]}"/>')
        keys.append(f"<span {color.attributes('key')}>{escape(name)}</span>")
    for name, x in marks.items():
        drawn.append(f'<path class="mark" d="M{across.place(x)} 0V{UNITS}"/>')
        keys.append(f'<span class="note">{escape(name)} {tick_label(float(f"{x:.2g}"))}</span>')
    axes = (
        tick_axis("y", up.ticks(), lambda tick: UNITS - up.place(tick)),
        tick_axis("x", across.ticks(), across.place),
    )
    return figure(title, "".join(keys), drawing="".join(drawn), axes=axes)


class _Axis:
    """Maps values to 0 … UNITS."""

    def __init__(self, values: Sequence[float], *, is_log: bool) -> None:
        self._is_log = is_log and min(values) > 0
        self._low, self._high = min(values), max(values)
        if self._low == self._high:
            self._low, self._high = (self._low / 2, self._high * 2) if self._is_log else (self._low - 1, self._high + 1)

    def place(self, value: float) -> float:
        low, high, here = (math.log10(v) if self._is_log else v for v in (self._low, self._high, value))
        return round(UNITS * (here - low) / (high - low), 1)

    def ticks(self) -> list[float]:
        powers = log_ticks(self._low, self._high) if self._is_log else []
        return powers if len(powers) > 1 else linear_ticks(self._low, self._high)
