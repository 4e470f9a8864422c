"""What a page's script draws from: points as JSON, small enough to send. No Lightning."""

import json
import math
from typing import Any

from ..run_record import Point
from .series import Chart


def chart_data(chart: Chart) -> dict[str, Any]:
    """What the script needs to draw a part of a chart."""
    return {
        "title": chart.title,
        "log": chart.log_scale,
        "curves": [
            {
                "name": curve.metric,
                **packed(curve.points),
                "undone": list(map(packed, curve.undone)),
                "trend": packed(curve.trend),
            }
            for curve in chart.curves
        ],
    }


def packed(points: list[Point]) -> dict[str, list[Any]]:
    """Steps as differences, values with six digits, what is no number as null."""
    steps = [step for step, _ in points]
    return {
        "steps": [b - a for a, b in zip([0, *steps], steps, strict=False)],
        "values": [short(value) for _, value in points],
    }


def short(value: float) -> float | int | None:
    """Six digits, and none for a fraction that is zero."""
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.6g}")


def as_json(data: dict[str, Any]) -> str:
    """For a script element; `<` is spelled so that no text can end it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
