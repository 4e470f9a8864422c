"""Downsample a curve for drawing without losing spikes: plain arithmetic on lists."""

import math
from itertools import pairwise

from ..run_record import Point

MAX_BUCKETS = 500


def thin(points: list[Point], *, max_buckets: int = MAX_BUCKETS) -> list[Point]:
    """Keep at most four points per bucket (first, lowest, highest and one non-finite), and the last point.

    A spike in a single row of a hundred thousand is thus drawn at full height.
    """
    if len(points) <= 4 * max_buckets:
        return points
    buckets = pairwise(_bounds(len(points), max_buckets))
    kept = [point for first, last in buckets for point in _extremes(points[first:last])]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def trend(points: list[Point], *, max_buckets: int) -> list[Point]:
    """Return the mean of each bucket's finite values at its middle step.

    Empty if there are so few points that each is visible.
    """
    if len(points) <= 4 * max_buckets:
        return []
    means: list[Point] = []
    for first, last in pairwise(_bounds(len(points), max_buckets)):
        finite = [value for _, value in points[first:last] if math.isfinite(value)]
        if finite:
            means.append((points[(first + last) // 2][0], sum(finite) / len(finite)))
    return means


def _bounds(num_points: int, num_buckets: int) -> list[int]:
    return [round(i * num_points / num_buckets) for i in range(num_buckets + 1)]


def _extremes(bucket: list[Point]) -> list[Point]:
    finite = [i for i, (_, value) in enumerate(bucket) if math.isfinite(value)]
    chosen = {0}
    if finite:
        chosen.add(min(finite, key=lambda i: bucket[i][1]))
        chosen.add(max(finite, key=lambda i: bucket[i][1]))
    if len(finite) < len(bucket):
        chosen.add(next(i for i, (_, value) in enumerate(bucket) if not math.isfinite(value)))
    return [bucket[i] for i in sorted(chosen)]


def segments(points: list[Point]) -> list[list[Point]]:
    """Split points into line segments, at non-finite values and where a rollback returned to an earlier step."""
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
