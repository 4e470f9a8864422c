"""Compute axis ticks and format labels: plain arithmetic."""

import math
from collections.abc import Sequence

from ..run_record import is_finite


def linear_ticks(low: float, high: float, *, max_ticks: int = 6) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten in [low, high], at most `max_ticks`."""
    exponent = math.floor(math.log10((high - low) / max_ticks))
    for step in (m * 10.0**e for e in (exponent, exponent + 1) for m in (1, 2, 5)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= max_ticks:
            break
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float, *, max_ticks: int = 5) -> list[float]:
    """Return powers of ten in [low, high]; every second or third one if there are too many."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / max_ticks))
    return [10.0**exponent for exponent in range(first, last + 1, stride)]


def tick_label(value: float) -> str:
    """Return a label short enough for an axis: `0`, `0.5`, `250`, `12k`, `1.5M`, `3e-4`."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e12:
        return f"{value:.3g}" if size >= 1e12 else _short_exponent(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{value / scale:.4g}{letter}"
    return f"{value:.4g}"


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return a label for each tick; all digits that differ where short labels would be equal: 0.92 and 0.9201."""
    short = [tick_label(tick) for tick in ticks]
    return short if len(set(short)) == len(short) else [f"{tick:,.9g}" for tick in ticks]


def _short_exponent(value: float) -> str:
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def value_label(value: float) -> str:
    """Return a measured value as text: five significant digits, thousands separated by commas."""
    if not is_finite(value):
        return str(value)
    if value == round(value) or abs(value) >= 1e4:
        return f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.4e}"
    return f"{value:.5g}"
