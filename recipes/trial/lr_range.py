"""Learning rate range test (Smith 2015, arXiv 1506.01186): increase the rate until the loss diverges."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

# the loss must fall by this fraction of its initial value, or the curve is not informative
_MIN_FALL = 0.02


def rising(step: int, *, num_steps: int, first_fraction: float) -> float:
    """Return a multiplier that grows geometrically from `first_fraction` to 1.

    Args:
        step: Optimizer step, from 0.
        num_steps: Optimizer steps of the test.
        first_fraction: Learning rate of the first step, as a fraction of the last one's.
    """
    return math.pow(first_fraction, 1 - step / (num_steps - 1))


@dataclass(frozen=True, kw_only=True)
class RangeTest:
    """Result of a range test.

    Attributes:
        learning_rates: Learning rate of each step.
        losses: Loss of each step.
        smoothed: Smoothed losses.
        steepest: Learning rate where the smoothed loss falls fastest; None if it does not fall.
        lowest: Learning rate where it is lowest; None if it does not fall.
        diverges: Learning rate from which it stays above its initial value; None if not within the test.
    """

    learning_rates: list[float]
    losses: list[float]
    smoothed: list[float]
    steepest: float | None
    lowest: float | None
    diverges: float | None


def read_range_test(learning_rates: Sequence[float], losses: Sequence[float], *, width: int) -> RangeTest:
    """Find the learning rates that matter in the curve of a range test.

    Args:
        learning_rates: Learning rate of each step, ascending.
        losses: Loss of each step; NaN and inf end the curve.
        width: Smoothing steps on either side.
    """
    end = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    smoothed = smooth(losses[:end], width=width)
    found = RangeTest(
        learning_rates=list(learning_rates[: len(losses)]),
        losses=list(losses),
        smoothed=smoothed,
        steepest=None,
        lowest=None,
        diverges=_find_divergence(learning_rates, smoothed, end_is_lost=end < len(losses)),
    )
    if len(smoothed) < 3:
        return found
    bottom = min(range(len(smoothed)), key=smoothed.__getitem__)
    if smoothed[0] - smoothed[bottom] < _MIN_FALL * abs(smoothed[0]):
        return found
    slopes = [smoothed[i + 1] - smoothed[i - 1] for i in range(1, bottom)]
    steepest = 1 + min(range(len(slopes)), key=slopes.__getitem__) if slopes else bottom
    return replace(found, steepest=learning_rates[steepest], lowest=learning_rates[bottom])


def smooth(values: Sequence[float], *, width: int) -> list[float]:
    """Smooth with a triangular window of `width` values on either side, truncated at the ends."""
    weights = {offset: width + 1 - abs(offset) for offset in range(-width, width + 1)}
    smoothed = []
    for i in range(len(values)):
        near = [(weights[j - i], values[j]) for j in range(max(0, i - width), min(len(values), i + width + 1))]
        smoothed.append(sum(w * value for w, value in near) / sum(w for w, _ in near))
    return smoothed


def _find_divergence(learning_rates: Sequence[float], smoothed: Sequence[float], *, end_is_lost: bool) -> float | None:
    """Return the first learning rate after which the loss stays above its start; None if it ends below."""
    if not smoothed:
        return learning_rates[0]
    last_good = max(i for i, loss in enumerate(smoothed) if loss <= smoothed[0])
    if last_good == len(smoothed) - 1:
        return learning_rates[len(smoothed)] if end_is_lost and len(smoothed) < len(learning_rates) else None
    return learning_rates[last_good + 1]
