"""Metric curves and robust statistics on them: medians, deviations, trends. Standard library only.

Medians and median absolute deviations are used because the few extreme values that every run has affect neither.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

SIGMA_PER_MAD = 1.4826  # for normally distributed values
ERROR_OF_MEDIAN = 1.2533  # standard error of a median, in standard deviations over the root of the count


@dataclass(frozen=True)
class Block:
    """Median of consecutive points."""

    first_step: int
    last_step: int
    median: float
    num_points: int


@dataclass(frozen=True)
class Curve:
    """One metric of a run.

    Attributes:
        name: Name of its column.
        steps: Steps in ascending order.
        values: Values, including NaN and inf.
    """

    name: str
    steps: Sequence[int]
    values: Sequence[float]

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def finite(self) -> "Curve":
        """The curve without NaN and inf."""
        kept = [(step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]
        return self if len(kept) == len(self) else Curve(self.name, [s for s, _ in kept], [v for _, v in kept])

    def part(self, start: float, end: float) -> "Curve":
        """Return the points between two fractions of the curve's length, at least one."""
        first = min(int(start * len(self)), len(self) - 1)
        last = max(first + 1, math.ceil(end * len(self)))
        return Curve(self.name, self.steps[first:last], self.values[first:last])

    def between(self, first_step: float, last_step: float) -> "Curve":
        """Return the points from `first_step` to `last_step`, inclusive."""
        first, end = bisect_left(self.steps, first_step), bisect_right(self.steps, last_step)
        return Curve(self.name, self.steps[first:end], self.values[first:end])

    def block(self) -> Block:
        """Return the median of all points."""
        return Block(self.steps[0], self.steps[-1], median(self.values), len(self))

    def blocks(self, count: int) -> list[Block]:
        """Return the medians of up to `count` parts of equal length, in order."""
        count = max(1, min(count, len(self)))
        edges = [round(i * len(self) / count) for i in range(count + 1)]
        return [
            Block(self.steps[first], self.steps[last - 1], median(self.values[first:last]), last - first)
            for first, last in pairwise(edges)
        ]

    @cached_property
    def noise(self) -> float:
        """Standard deviation of single points around the trend.

        The larger of two robust estimates: from differences of neighboring points, which a trend does not affect, and
        from residuals around the medians of 20 parts, which smoothing over neighboring steps does not hide.
        """
        values = self.finite.values
        if len(values) < 3:
            return 0.0
        from_neighbors = spread([b - a for a, b in pairwise(values)]) / math.sqrt(2)
        size = max(3, len(values) // 20)
        parts = [values[i : i + size] for i in range(0, len(values), size)]
        centered = [(median(part), part) for part in parts if len(part) >= 3]
        residuals = [value - center for center, part in centered for value in part]
        return max(from_neighbors, spread(residuals))


def spread(values: Sequence[float]) -> float:
    """Return the robust standard deviation: 1.4826 times the median absolute deviation; 0 for no values."""
    if not values:
        return 0.0
    center = median(values)
    return SIGMA_PER_MAD * median(abs(value - center) for value in values)


def standard_error(noise: float, *counts: int) -> float:
    """Return the standard error of a difference of medians over `counts` points each."""
    return ERROR_OF_MEDIAN * noise * math.sqrt(sum(1 / count for count in counts))


def trend(values: Sequence[float]) -> float:
    """Return Kendall's tau against time: 1 for strictly increasing values, -1 for strictly decreasing ones."""
    pairs = [(a, b) for i, a in enumerate(values) for b in values[i + 1 :]]
    if not pairs:
        return 0.0
    return sum((b > a) - (b < a) for a, b in pairs) / len(pairs)


def scatter_around_line(values: Sequence[float]) -> float:
    """Return the robust standard deviation around the Theil-Sen line, the median slope between all pairs."""
    slopes = [(values[j] - values[i]) / (j - i) for i in range(len(values)) for j in range(i + 1, len(values))]
    slope = median(slopes) if slopes else 0.0
    return spread([value - slope * i for i, value in enumerate(values)])
