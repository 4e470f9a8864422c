"""Few enough points of a curve to draw, and no spike lost: plain arithmetic on lists."""

import math
from itertools import pairwise

from ..run_record import Point

MAX_BUCKETS = 500


def thin(points: list[Point], *, max_buckets: int = MAX_BUCKETS) -> list[Point]:
    """At most four points for each bucket: first, lowest, highest, one not finite; and the last of all.

    So a spike of a single row in a hundred thousand is drawn as high as it was.
    """
    if len(points) <= 4 * max_buckets:
        return points
    bounds = pairwise(_bounds(len(points), max_buckets))
    kept = [point for a, b in bounds for point in _telling(points[a:b])]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def trend(points: list[Point], *, max_buckets: int) -> list[Point]:
    """The mean of each bucket's finite values, at its middle step.

    Empty where the points are few enough to be seen one by one.
    """
    if len(points) <= 4 * max_buckets:
        return []
    found: list[Point] = []
    for first, last in pairwise(_bounds(len(points), max_buckets)):
        finite = [value for _, value in points[first:last] if math.isfinite(value)]
        if finite:
            found.append((points[(first + last) // 2][0], sum(finite) / len(finite)))
    return found


def _bounds(num_points: int, num_buckets: int) -> list[int]:
    return [round(i * num_points / num_buckets) for i in range(num_buckets + 1)]


def _telling(bucket: list[Point]) -> list[Point]:
    finite = [i for i, (_, value) in enumerate(bucket) if math.isfinite(value)]
    chosen = {0}
    if finite:
        chosen.add(min(finite, key=lambda i: bucket[i][1]))
        chosen.add(max(finite, key=lambda i: bucket[i][1]))
    if len(finite) < len(bucket):
        chosen.add(next(i for i, (_, value) in enumerate(bucket) if not math.isfinite(value)))
    return [bucket[i] for i in sorted(chosen)]


def segments(points: list[Point]) -> list[list[Point]]:
    """The stretches to draw as one line: broken where a value is not finite, and where a rollback went back."""
    found: list[list[Point]] = []
    current: list[Point] = []
    for step, value in points:
        finite = math.isfinite(value)
        if current and (not finite or step < current[-1][0]):
            found.append(current)
            current = []
        if finite:
            current.append((step, value))
    return [*found, current] if current else found
