"""Write the page of a preflight: a table of its checks, and input images as the model sees them. No Lightning."""

import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .html import write_mode_page

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
        about: What the page is about, see `write_mode_page`.

    Raises:
        OSError: The file cannot be written.
    """
    order = [*_CLASSES]
    statuses = [result["status"] for result in results]
    counts = {status: statuses.count(status) for status in order}
    by_status = sorted(results, key=lambda result: [*order, result["status"]].index(result["status"]))
    write_mode_page(
        path,
        "preflight.jinja",
        "Preflight",
        about=about,
        pills={f"{count} {_TOTALS[status]}": _CLASSES[status] for status, count in counts.items() if count},
        checks=[result for result in by_status if result["status"] != "look"],
        classes=_CLASSES,
        read=[result["found"] for result in results if result["status"] == "look"],
        images=[(_png(channels), len(channels[0]), len(channels[0][0]), label) for channels, label in images],
        width=_WIDTH,
    )


def _png(channels: Any) -> str:
    """Return an image as base64 of a PNG, scaled to its own range; RGB of three channels, else gray of the first."""
    values = [value for channel in channels for row in channel for value in row]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    colors = channels if len(channels) == 3 else channels[:1]
    height, width = len(channels[0]), len(channels[0][0])
    # each row begins with its filter, 0: none
    rows = (
        bytes([0, *(round(255 * (channel[y][x] - low) / span) for x in range(width) for channel in colors)])
        for y in range(height)
    )
    head = struct.pack("!IIBBBBB", width, height, 8, 2 if len(colors) == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    packed = (
        struct.pack("!I", len(data)) + name + data + struct.pack("!I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(packed)).decode()
