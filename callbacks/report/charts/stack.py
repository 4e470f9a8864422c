"""Draw values as stacked areas, as inline SVG that stretches with the page."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

from .axis import linear_ticks, tick_label
from .svg import UNITS, axis_labels, figure, get_colors, grid_path, tick_axis

_LABEL_WIDTH = 0.17  # of the chart, on a page of 390 pixels
_LAST_LABEL = 0.94  # its second half stays within the chart


def stack_figure(
    values: Mapping[str, Sequence[float]], *, places: Sequence[str], limit: float | None, unit: str
) -> str:
    """Return one `<figure>`: a stacked area per name, and the limit as a line.

    Args:
        values: Values at each position by name, all of equal length.
        places: Description of each position; the part before a comma labels the axis.
        limit: Maximum of the sum; None draws no line.
        unit: Unit of the values, as plain text.
    """
    num_places = len(places)
    totals = [sum(series[i] for series in values.values()) for i in range(num_places)]
    top = max([*totals, 1e-9]) * 1.05
    # a limit far above the values would flatten the chart
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
    y_labels = tick_axis("y", ticks, lambda tick: _y(tick, top))
    drawing = f"{grid_path(_y(tick, top) for tick in ticks)}{''.join(areas)}{line}"
    return figure(unit, "".join(keys), drawing=drawing, axes=(y_labels, axis_labels("x", _x_labels(places))))


def _outline(below: Sequence[float], above: Sequence[float], top: float) -> str:
    """Return the outline of an area whose values are constant until the next position."""
    width = UNITS / len(above)
    upper = [(round(i * width, 1), round((i + 1) * width, 1), _y(value, top)) for i, value in enumerate(above)]
    lower = [(round(i * width, 1), round((i + 1) * width, 1), _y(value, top)) for i, value in enumerate(below)]
    forth = "".join(f"L{left} {height}L{right} {height}" for left, right, height in upper)
    back = "".join(f"L{right} {height}L{left} {height}" for left, right, height in reversed(lower))
    return f"M{forth[1:]}{back}Z"


def _y(value: float, top: float) -> float:
    return round(UNITS * (1 - value / top), 1)


def _x_labels(places: Sequence[str]) -> Iterator[tuple[float, str]]:
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
