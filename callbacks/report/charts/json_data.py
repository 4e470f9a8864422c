"""Encode chart data for a page's script as compact JSON. No Lightning."""

import json
import math
from typing import Any

from ..run_record import Point
from .series import Chart


def chart_data(chart: Chart) -> dict[str, Any]:
    """Return the data from which the script can redraw any part of a chart."""
    return {
        "title": chart.title,
        "log": chart.log_scale,
        "curves": [
            {
                "name": curve.metric,
                **packed(curve.points),
                "rolled_back": list(map(packed, curve.rolled_back)),
                "trend": packed(curve.trend),
            }
            for curve in chart.curves
        ],
    }


def packed(points: list[Point]) -> dict[str, list[Any]]:
    """Encode steps as differences and values with six significant digits; NaN and inf become null."""
    steps = [step for step, _ in points]
    return {
        "steps": [b - a for a, b in zip([0, *steps], steps, strict=False)],
        "values": [short(value) for _, value in points],
    }


def short(value: float) -> float | int | None:
    """Round to six significant digits, to an int if the value is integral; None for NaN and inf."""
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.6g}")


def as_json(data: dict[str, Any]) -> str:
    """Return JSON for a script element; `<` is escaped so that no text can close the element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
