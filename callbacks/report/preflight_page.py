"""Write the page of a preflight: a table of its checks, and input images as the model sees them. No Lightning."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .html import render_page, section, table, write_page

_WIDTH = 96  # displayed width of an image, so that small ones are visible
_ORDER = {"fail": 0, "warn": 1}


def write_preflight_page(path: Path, results: Sequence[Mapping[str, Any]], images: Sequence[tuple[Any, int]]) -> None:
    """Write the page.

    Args:
        path: File to write.
        results: One mapping per check: `check`, `status`, `found` and `remedy`.
        images: Nested lists [C][H][W] of numbers, each with its class.

    Raises:
        OSError: The file cannot be written.
    """
    rows = [
        (
            f'<b style="white-space:nowrap">{escape(result["status"])}</b>',
            escape(result["check"]),
            escape(result["found"]) + (f"<br><i>{escape(result['remedy'])}</i>" if result["remedy"] else ""),
        )
        for result in sorted(results, key=lambda result: _ORDER.get(result["status"], 2))
        if result["status"] != "look"
    ]
    read = "\n".join(result["found"] for result in results if result["status"] == "look")
    body = "<h1>Preflight</h1>" + section("Checks", table(["", "check", "found"], rows, css="list"))
    body += section("What the model reads", f"<pre>{escape(read)}</pre>{''.join(map(_draw, images))}")
    write_page(path, render_page(title="Preflight", body=body, data={}, styles=["page.css"], scripts=[]))


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
