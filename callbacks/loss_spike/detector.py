"""Detect outliers and slow drifts in a series of losses or gradient norms: arithmetic on Python floats, no torch.

The fast rule compares a value with the median and MAD (median absolute deviation) of recent normal values, so that an
outlier neither raises the threshold for the next value nor hides it. The slow rule compares the median of recent
values with the lowest such median so far. The level rule compares the median of a few newest values with all those
before them in the window.

Spread alone separates spikes from noise only if the noise is narrow and its distribution is stationary, as in language
model pre-training. Elsewhere, hard batches, warm restarts or a change of augmentation are outliers too; `min_rise`
additionally requires a value far above everything seen in the run.
"""

import math
import sys
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

# 1.4826 MAD is the standard deviation of a normal distribution
_MAD_TO_SD = 1.4826
# minimum standard deviation, as a fraction of the median: equal values have zero spread
_SMALLEST_SD = 1e-3
_SMALLEST = sys.float_info.min  # positive even if denormals are flushed to zero
_LARGEST_LOG = 709.0  # largest value whose exponential does not overflow
_DRIFT_PATIENCE = 20  # consecutive values above `drift_threshold` before a drift is reported
LEVEL_STEPS = 16  # newest values whose median is the level
_LEVEL_RISE = 2.0  # multiple of the distance from the median to the largest of the values before


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """An outlier, or a drift.

    Attributes:
        kind: `non_finite`, `spike` (a single value) or `drift` (recent values as a whole).
        value: The value; for a drift, the median of the newest values.
        expected: Reference that the value is compared with; NaN during the warm-up.
        score: Robust standard deviations above `expected`; inf if the value is not finite.
    """

    kind: Literal["non_finite", "spike", "drift"]
    value: float
    expected: float
    score: float


class SpikeDetector:
    """Detects spikes and drifts in one series.

    Args:
        window: Recent normal values that each new value is compared with.
        warmup_steps: Values before spikes can be detected; at most `window`. NaN and inf always raise an alarm.
        spike_score: Robust standard deviations above the median at which a value is a spike.
        drift_threshold: Robust standard deviations by which the median of the newer half of a full window may exceed
            its lowest value so far. None disables drift detection: in healthy runs, norms can rise for thousands of
            steps, losses do not.
        logarithmic: Compare logarithms, for series in which ratios matter, such as gradient norms.
        min_rise: Also require a spike or drift to exceed the median by this multiple of the distance from the median to
            the largest normal value so far. 0 uses spread alone.
        finds_levels: Also report a drift when the median of the newest 16 values is twice as far above the median of
            the window before them as any value of it: a rise that lasts, even if it is within the range of the run.

    Raises:
        ValueError: `warmup_steps` exceeds `window`.
    """

    def __init__(
        self,
        *,
        window: int = 128,
        warmup_steps: int = 64,
        spike_score: float = 8.0,
        drift_threshold: float | None = 1.75,
        logarithmic: bool = False,
        min_rise: float = 0.0,
        finds_levels: bool = False,
    ) -> None:
        if not 2 <= warmup_steps <= window:
            raise ValueError(f"a warm-up of {warmup_steps} values needs a window of at least as many")
        self._warmup_steps = warmup_steps
        self._spike_score = spike_score
        self._drift_threshold = drift_threshold
        self._logarithmic = logarithmic
        self._min_rise = min_rise
        self._peak: float | None = None  # the largest normal value so far
        self._values: deque[float] = deque(maxlen=window)  # logarithms, if `logarithmic`
        self._computed: tuple[float, float] | None = None  # median and spread of the current window
        self._lowest: tuple[float, float] | None = None  # median of half a window, and its spread
        self._num_above = 0
        # the newest values, whether normal or not, and whether each entered the window
        self._newest: deque[tuple[float, bool]] | None = deque(maxlen=LEVEL_STEPS) if finds_levels else None

    @property
    def window(self) -> list[float]:
        """Values that a new value is compared with, oldest first."""
        return [self._unscale(value) for value in self._values]

    @property
    def _normal(self) -> tuple[float, float]:
        """Median and spread of the window, computed once per step."""
        if self._computed is None:
            self._computed = _center_and_spread(self._values)
        return self._computed

    def score(self, value: float) -> float:
        """Return the robust standard deviations above the median; 0 during the warm-up, inf for NaN or inf."""
        if not math.isfinite(value):
            return math.inf
        if len(self._values) < self._warmup_steps:
            return 0.0
        center, spread = self._normal
        return (self._scale(value) - center) / spread

    def limit(self) -> float:
        """Return the threshold at which a finite value is a spike; inf during the warm-up."""
        if len(self._values) < self._warmup_steps:
            return math.inf
        center, spread = self._normal
        scaled = center + self._spike_score * spread
        if self._logarithmic and scaled > _LARGEST_LOG:
            return math.inf
        return max(self._unscale(scaled), self._least_spike(self._unscale(center)))

    def observe(self, value: float) -> Alarm | None:
        """Check the next value; add it to the window if it is normal.

        Args:
            value: Mean over all ranks, so that all ranks reach the same result.
        """
        score, expected = self.score(value), self._expected()
        if not math.isfinite(value):
            return Alarm(kind="non_finite", value=value, expected=expected, score=score)
        is_spike = score > self._spike_score and value > self._least_spike(expected)
        level = self._find_level(value, is_normal=not is_spike)
        if is_spike:
            return level or Alarm(kind="spike", value=value, expected=expected, score=score)
        self._values.append(self._scale(value))
        self._computed = None
        self._peak = value if self._peak is None else max(self._peak, value)
        return level or self._find_drift()

    def forget(self) -> None:
        """Relearn the normal level from scratch, after an intended change such as a new learning rate."""
        self._values.clear()
        self._computed = None
        self._peak = None
        self._lowest, self._num_above = None, 0
        self._forget_newest()

    def _forget_newest(self) -> None:
        if self._newest is not None:
            self._newest.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {
            "values": list(self._values),
            "lowest": None if self._lowest is None else list(self._lowest),
            "num_above": self._num_above,
            "peak": self._peak,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; if its window is longer, keep the newest values."""
        self._values.clear()
        self._computed = None
        self._values.extend(state["values"])
        lowest = state["lowest"]
        self._lowest = None if lowest is None else (lowest[0], lowest[1])
        self._num_above = state["num_above"]
        self._peak = state["peak"]
        self._forget_newest()

    def _find_level(self, value: float, *, is_normal: bool) -> Alarm | None:
        """Compare the newest values, this one included, with those of the window before them."""
        if self._newest is None:
            return None
        num_before = len(self._values) - sum(entered for _, entered in list(self._newest)[-LEVEL_STEPS + 1 :])
        self._newest.append((self._scale(value), is_normal))
        if len(self._newest) < LEVEL_STEPS or num_before < self._warmup_steps:
            return None
        before = list(self._values)[:num_before]
        center, spread = _center_and_spread(before)
        level = median(newest for newest, _ in self._newest)
        if level <= center + max(_LEVEL_RISE * (max(before) - center), spread):
            return None
        self._forget_newest()
        score = (level - center) / spread
        return Alarm(kind="drift", value=self._unscale(level), expected=self._unscale(center), score=score)

    def _find_drift(self) -> Alarm | None:
        if self._drift_threshold is None or len(self._values) < (self._values.maxlen or 0):
            return None
        newest = list(self._values)[len(self._values) // 2 :]
        center, spread = _center_and_spread(newest)
        if self._lowest is None or center < self._lowest[0]:
            self._lowest, self._num_above = (center, spread), 0
            return None
        lowest, spread_there = self._lowest
        score = (center - lowest) / spread_there
        is_above = score > self._drift_threshold and self._unscale(center) >= self._least_spike(self._unscale(lowest))
        self._num_above = self._num_above + 1 if is_above else 0
        if self._num_above < _DRIFT_PATIENCE:
            return None
        return Alarm(kind="drift", value=self._unscale(center), expected=self._unscale(lowest), score=score)

    def _least_spike(self, center: float) -> float:
        """Return the value above which `min_rise` permits an alarm, given the median of normal values."""
        return center if self._peak is None else center + self._min_rise * max(self._peak - center, 0.0)

    def _expected(self) -> float:
        if len(self._values) < self._warmup_steps:
            return math.nan
        return self._unscale(self._normal[0])

    def _scale(self, value: float) -> float:
        if not self._logarithmic:
            return value
        return math.log(max(value, _SMALLEST))

    def _unscale(self, scaled: float) -> float:
        return math.exp(scaled) if self._logarithmic else scaled


def _center_and_spread(values: Collection[float]) -> tuple[float, float]:
    """Return the median and the standard deviation, estimated from the median absolute deviation."""
    center = median(values)
    deviation = median(abs(value - center) for value in values)
    return center, max(_MAD_TO_SD * deviation, _SMALLEST_SD * abs(center), _SMALLEST)
