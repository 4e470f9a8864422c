"""Draw values that add up as stacked areas: inline SVG that stretches with the page, as the other charts."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

from .axis import linear_ticks, tick_label
from .svg import UNITS, get_colors


def stack_figure(
    values: Mapping[str, Sequence[float]], *, places: Sequence[str], limit: float | None, unit: str
) -> str:
    """Return one `<figure>`: an area per name, one upon the other, and the limit as a line.

    Args:
        values: Name -> value at each place; all of one length.
        places: What each place belongs to; the word before a comma labels the axis.
        limit: What the sum must not exceed; None: no line.
        unit: Of the values, plain text.
    """
    num_places = len(places)
    totals = [sum(series[i] for series in values.values()) for i in range(num_places)]
    top = max([*totals, 1e-9]) * 1.05
    # a limit far above would flatten the picture
    shows_limit = limit is not None and limit <= 2 * top
    if limit is not None and shows_limit:
        top = max(top, limit * 1.05)
    below = [0.0] * num_places
    areas, keys = [], []
    for (name, series), color in zip(values.items(), get_colors(len(values)), strict=True):
        above = [low + value for low, value in zip(below, series, strict=True)]
        areas.append(f'<path {color.attributes("area")} d="{_outline(below, above, top)}"/>')
        keys.append(f"<span {color.attributes('key')}>{escape(name)}</span>")
        below = above
    line = ""
    if limit is not None and shows_limit:
        height = _y(limit, top)
        line = f'<path class="limit" d="M0 {height}H{UNITS}"/>'
        keys.append(f'<span class="note">dashed: {tick_label(limit)} usable</span>')
    ticks = linear_ticks(0.0, top)
    grid = "".join(f"M0 {_y(tick, top)}H{UNITS}" for tick in ticks)
    y_labels = "".join(
        f'<span class="y" style="top:{_y(tick, top) / 10:.1f}%">{escape(tick_label(tick))}</span>' for tick in ticks
    )
    return (
        f'<figure class="chart span6"><figcaption><b>{escape(unit)}</b>{"".join(keys)}</figcaption>'
        f'<div class="plot"><div class="ys">{y_labels}</div><div class="xs">{_x_labels(places)}</div>'
        f'<svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" role="img" aria-label="{escape(unit)}">'
        f'<path class="grid" d="{grid}"/>{"".join(areas)}{line}</svg></div></figure>'
    )


def _outline(below: Sequence[float], above: Sequence[float], top: float) -> str:
    """Return the path around an area whose values hold until the next place."""
    width = UNITS / len(above)
    upper = [(round(i * width, 1), round((i + 1) * width, 1), _y(value, top)) for i, value in enumerate(above)]
    lower = [(round(i * width, 1), round((i + 1) * width, 1), _y(value, top)) for i, value in enumerate(below)]
    forth = "".join(f"L{left} {height}L{right} {height}" for left, right, height in upper)
    back = "".join(f"L{right} {height}L{left} {height}" for left, right, height in reversed(lower))
    return f"M{forth[1:]}{back}Z"


def _y(value: float, top: float) -> float:
    return round(UNITS * (1 - value / top), 1)


def _x_labels(places: Sequence[str]) -> str:
    """Label each stretch of the step in its middle, by its first word."""
    labels, start = [], 0
    for word, group in groupby(places, key=lambda place: place.partition(",")[0]):
        length = len(list(group))
        middle = 100 * (start + length / 2) / len(places)
        if length / len(places) > 0.05:  # narrower ones would overlap
            labels.append(f'<span class="x" style="left:{middle:.1f}%">{escape(word)}</span>')
        start += length
    return "".join(labels)
