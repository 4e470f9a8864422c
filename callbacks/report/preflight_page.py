"""Write the page of a preflight: a table of its checks, and input images as the model sees them. No Lightning."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .header import mode_head, page_title, pill
from .html import render_page, section, table, write_page

_WIDTH = 96  # displayed width of an image, so that small ones are visible
_CLASSES = {"fail": "bad", "warn": "warn", "pass": "good"}  # in the order of the rows; others come last
_TOTALS = {"fail": "failed", "warn": "to look at", "pass": "passed"}


def write_preflight_page(
    path: Path,
    results: Sequence[Mapping[str, Any]],
    images: Sequence[tuple[Any, int]],
    *,
    about: Mapping[str, Any],
) -> None:
    """Write the page.

    Args:
        path: File to write.
        results: One mapping per check: `check`, `status`, `found` and `remedy`.
        images: Nested lists [C][H][W] of numbers, each with its class.
        about: What the page is about, see `mode_head`.

    Raises:
        OSError: The file cannot be written.
    """
    order = [*_CLASSES]
    statuses = [result["status"] for result in results]
    counts = {status: statuses.count(status) for status in order}
    pills = {f"{count} {_TOTALS[status]}": _CLASSES[status] for status, count in counts.items() if count}
    rows = [
        (
            pill(result["status"], _CLASSES.get(result["status"], "")),
            escape(result["check"]),
            escape(result["found"]) + (f"<br><i>{escape(result['remedy'])}</i>" if result["remedy"] else ""),
        )
        for result in sorted(results, key=lambda result: [*order, result["status"]].index(result["status"]))
        if result["status"] != "look"
    ]
    read = "\n".join(result["found"] for result in results if result["status"] == "look")
    body = mode_head("Preflight", about, pills=pills)
    body += section("Checks", table(["", "check", "found"], rows, css="list checks"))
    body += section("What the model reads", f"<pre>{escape(read)}</pre>{''.join(map(_draw, images))}")
    write_page(
        path, render_page(title=page_title("Preflight", about), body=body, data={}, styles=["page.css"], scripts=[])
    )


def _draw(image: tuple[Any, int]) -> str:
    """Return an image as SVG, scaled to its own value range; RGB if it has three channels, else its first channel."""
    channels, label = image
    values = [value for channel in channels for row in channel for value in row]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    height, width = len(channels[0]), len(channels[0][0])
    colors = channels if len(channels) == 3 else [channels[0]] * 3

    def fill(x: int, y: int) -> str:
        return ",".join(str(round(255 * (channel[y][x] - low) / span)) for channel in colors)

    cells = "".join(
        f'<rect x="{x}" y="{y}" width="1" height="1" fill="rgb({fill(x, y)})"/>'
        for y in range(height)
        for x in range(width)
    )
    size = f'width="{_WIDTH}" height="{_WIDTH * height // width}" viewBox="0 0 {width} {height}"'
    return f'<svg {size} role="img" aria-label="class {label}" shape-rendering="crispEdges">{cells}</svg> {label} '
