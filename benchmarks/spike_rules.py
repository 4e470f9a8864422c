"""Spike detection rules: ours, and those of other projects, reimplemented from their published definitions.

Each rule takes the all-reduced loss and the gradient norm before clipping for every step, and returns flagged steps.
"""

import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import recipes  # noqa: F401  # isort: skip  # before Lightning, as in measure.py

from callbacks.loss_spike.monitor import SpikeMonitor, StepMeasurement

Series = Sequence[float]


def ours(losses: Series, norms: Series) -> list[int]:
    """Flag 8 deviations of loss, 16 of log norm, or drift, by median and MAD of the last 128 unflagged steps.

    These are the settings of the language model recipes.
    """
    return _flag(losses, norms, drift_threshold=1.75, min_rise=0.0)


def ours_by_default(losses: Series, norms: Series) -> list[int]:
    """Also require 3 times the largest earlier rise above the median, and ignore drift: `LossSpikeRollback()`."""
    return _flag(losses, norms, drift_threshold=None, min_rise=3.0)


def _flag(losses: Series, norms: Series, *, drift_threshold: float | None, min_rise: float) -> list[int]:
    watch = SpikeMonitor(
        window=128,
        warmup_steps=64,
        loss_threshold=8.0,
        norm_threshold=16.0,
        drift_threshold=drift_threshold,
        min_rise=min_rise,
    )
    flagged = []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        reading = StepMeasurement(step=step, loss=loss, norm=norm, skipped=False)
        if watch.judge(reading, overflowed=False).alarms:
            flagged.append(step)
    return flagged


def olmo_core(losses: Series, norms: Series) -> list[int]:
    """Flag 6 deviations above the mean of the last 128 values, after 64 values (OLMo-core, SkipStepOptimizer).

    Skips the step, on loss or norm; every value enters the window.
    """
    windows = [deque[float](maxlen=128), deque[float](maxlen=128)]
    flagged = []
    for step, values in enumerate(zip(losses, norms, strict=True), start=1):
        out = False
        for window, value in zip(windows, values, strict=True):
            if len(window) >= 64:
                mean = sum(window) / len(window)
                variance = sum((v - mean) ** 2 for v in window) / (len(window) - 1)
                # negated because comparisons with NaN are false: NaN is flagged, as OLMo-core's update factor is then 0
                out |= not value <= mean + 6 * math.sqrt(variance)
            window.append(value)
        if out:
            flagged.append(step)
    return flagged


def llm_foundry(losses: Series, norms: Series) -> list[int]:
    """Flag 5 steps in a row above twice the mean of the window, or a window half above 10 (llm-foundry, KillLossSpike).

    The window is 5 % of the run, at least 100 steps. Ends the run or logs.
    """
    window = deque[float](maxlen=max(100, len(losses) // 20))
    flagged, running = [], 0
    for step, loss in enumerate(losses, start=1):
        if len(window) == window.maxlen:
            mean = sum(window) / len(window)
            running = running + 1 if loss >= 2 * mean else 0
            above_cap = sum(v > 10 for v in window) > len(window) / 2
            if running >= 5 or above_cap:
                flagged.append(step)
        window.append(loss)
    return flagged


def lightning(losses: Series, norms: Series) -> list[int]:
    """Flag 3 times the mean of the last 10 losses, or NaN and inf (Lightning 2.6, SpikeDetection); ends the run."""
    window = deque[float](maxlen=10)
    flagged = []
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            flagged.append(step)
            continue
        if window and loss - statistics.fmean(window) >= 2.0 * statistics.fmean(window):
            flagged.append(step)
        window.append(loss)
    return flagged


def zclip(losses: Series, norms: Series) -> list[int]:
    """Flag a norm 2.5 deviations above moving averages with decay 0.97, after 25 steps (ZClip); clips."""
    flagged: list[int] = []
    first, mean, variance = list[float](), 0.0, 0.0
    for step, norm in enumerate(norms, start=1):
        if len(first) < 25:
            if math.isfinite(norm):
                first.append(norm)
            if len(first) == 25:
                mean, variance = statistics.fmean(first), statistics.pvariance(first)
            continue
        deviation = math.sqrt(variance) + 1e-6
        score = (norm - mean) / deviation
        value = norm
        if not score <= 2.5:
            flagged.append(step)
            value = mean + 2.5 / max(score, 2.5) * 2.5 * deviation if math.isfinite(norm) else mean
        variance = 0.97 * variance + 0.03 * (value - mean) ** 2
        mean = 0.97 * mean + 0.03 * value
    return flagged


RULES: dict[str, Callable[[Series, Series], list[int]]] = {
    "ours": ours,
    "ours, defaults": ours_by_default,
    "OLMo-core": olmo_core,
    "llm-foundry": llm_foundry,
    "Lightning": lightning,
    "ZClip": zclip,
}
