"""Spikes in the training loss: those that come with large gradients, and those of single bad batches."""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from .curve import Curve
from .finding import Cause, Evidence, Finding
from .run import Run

WINDOW = 64  # normal rows that a row is compared with
MIN_WINDOW = 20
DEVIATIONS = 8.0  # robust standard deviations above the median, as in LossSpikeRollback
QUARTILES_PER_SIGMA = 1.349  # interquartile range of a normal distribution; cheap to read off a sorted window
# Minimum distance above the median, relative to the largest of any unflagged row: losses of healthy classifiers are
# heavy-tailed, but no value of such a tail is three times as far out as the next.
BEYOND_NORMAL = 3.0
BEYOND_WITH_NORM = 2.0  # if the gradient was also large and the loss stays high for several steps
SETTLING = 20  # rows after a flagged one that do not count as normal; this many flagged in a row are a new level
# maximum spikes within 100 rows to either side: more are noise, as with alternating tasks or sparse rewards
MAX_NEIGHBORS, NEIGHBORHOOD = 6, 100
LASTING = 3  # rows above the normal range: a bad batch lasts one step, damaged weights take longer to recover
NORM_RATIO = 3.0  # gradient norm relative to the median of the preceding rows


@dataclass(frozen=True)
class Spike:
    """Consecutive rows with a loss far above normal."""

    row: int
    step: int
    value: float
    normal: float
    num_rows: int
    norm_ratio: float | None


def find_unstable_spikes(run: Run) -> Finding | None:
    """Detect spikes that come with a large gradient and last for several steps: the weights were damaged."""
    spikes = [spike for spike in find_spikes(run) if _is_unstable(spike)]
    if not spikes:
        return None
    return Finding(
        severity="warning",
        meaning=f"{_count(spikes)} with a large gradient, and the steps after it are worse: an update was too large",
        evidence=_describe(run.curves["loss"], spikes),
        causes=(
            Cause(
                "the learning rate is too high",
                run.suggest(run.scaled_override("optimizer.lr", 0.5), "half the learning rate"),
            ),
            Cause(
                "rare large gradients are not clipped",
                run.suggest("trainer.gradient_clip_val=1.0", "clip at twice the median of the gradient norm"),
            ),
            Cause(
                "Adam's second moment is too slow to follow",
                run.suggest(run.setting("optimizer.betas", "[0.9,0.95]"), "beta2 of 0.95 instead of 0.999"),
            ),
            Cause(
                "data, targets or objective changed at that step, on purpose: harmless",
                "compare the steps with your schedule of data, loss terms and target networks",
            ),
        ),
    )


def find_bad_batches(run: Run) -> Finding | None:
    """Detect single-step spikes after which the loss returns to normal: the batch was bad, not the weights."""
    found = find_spikes(run)
    lasting = [spike.step for spike in found if spike.num_rows >= LASTING]
    spikes = [
        spike
        for spike in found
        if spike.num_rows < LASTING and not any(abs(spike.step - step) <= SETTLING for step in lasting)
    ]
    if not spikes:
        return None
    step = max(spikes, key=lambda spike: spike.value).step
    return Finding(
        severity="warning",
        meaning=f"{_count(spikes)}, and the loss is normal again at once: those batches are unlike the others",
        evidence=_describe(run.curves["loss"], spikes),
        causes=(
            Cause(
                "wrong targets, broken files or text of another kind in these batches",
                run.suggest(
                    f"mode=replay {run.resume} mode.step={step}",
                    f"print the samples of step {step:,} by their loss",
                ),
            ),
            Cause(
                "the loss of a batch is divided by too few targets",
                run.suggest("global_batch_size=64", "print the number of targets that are not masked at that step"),
            ),
        ),
    )


def find_spikes(run: Run) -> list[Spike]:
    """Return the spikes in the training loss, in order of steps."""
    loss = run.curves["loss"].finite
    flags, normals, rises = _flag(loss.values)
    usual = _find_usual_rise(flags, rises)
    starts = [row for row, is_high in enumerate(flags) if is_high and not (row and flags[row - 1])]
    norms = run.curves.get("grad_norm")
    spikes = []
    number = 0
    while number < len(flags):
        if not flags[number]:
            number += 1
            continue
        end = number
        while end + 1 < len(flags) and rises[end + 1] > usual:
            end += 1
        top = max(range(number, end + 1), key=lambda i: loss.values[i])
        ratio = _compare_norm(norms, loss.steps[max(0, number - 1)], loss.steps[end]) if norms else None
        spike = Spike(number, loss.steps[top], loss.values[top], normals[number], end - number + 1, ratio)
        is_proven = ratio is not None and _is_unstable(spike)
        if rises[top] > (BEYOND_WITH_NORM if is_proven else BEYOND_NORMAL) * usual:
            spikes.append(spike)
        number = end + 1
    return [spike for spike in spikes if _is_rare(spike, starts)]


def _is_rare(spike: Spike, starts: Sequence[int]) -> bool:
    """Return whether few other spikes start near this one."""
    near = bisect_right(starts, spike.row + NEIGHBORHOOD) - bisect_left(starts, spike.row - NEIGHBORHOOD)
    return near <= MAX_NEIGHBORS


def _find_usual_rise(flags: Sequence[bool], rises: Sequence[float]) -> float:
    """Return the largest rise above the median among rows that are neither flagged nor shortly after a flagged row."""
    usual, settling = 0.0, 0
    for is_high, rise in zip(flags, rises, strict=True):
        settling = SETTLING if is_high else settling - 1
        if settling <= 0:
            usual = max(usual, rise)
    return usual


def _flag(values: Sequence[float]) -> tuple[list[bool], list[float], list[float]]:
    """Return for each value whether it is high, the median of preceding normal values, and its rise above it."""
    window: list[float] = []  # sorted
    recent: list[float] = []  # in order of steps
    flags, normals, rises = [], [], []
    num_high = 0
    for value in values:
        center = window[len(window) // 2] if window else value
        is_high = False
        if len(window) >= MIN_WINDOW:
            quartiles = window[3 * len(window) // 4] - window[len(window) // 4]
            deviation = quartiles / QUARTILES_PER_SIGMA
            is_high = value - center > DEVIATIONS * max(deviation, 1e-3 * abs(center)) > 0
        flags.append(is_high)
        normals.append(center)
        rises.append(value - center if len(window) >= MIN_WINDOW else 0.0)
        num_high = num_high + 1 if is_high else 0
        if is_high and num_high <= SETTLING:
            continue
        insort(window, value)
        recent.append(value)
        if len(recent) > WINDOW:
            del window[bisect_left(window, recent.pop(0))]
    return flags, normals, rises


def _compare_norm(norms: Curve, first_step: int, last_step: int) -> float | None:
    """Return the largest gradient norm of a range of steps relative to the median of the 64 rows before it."""
    finite = norms.finite
    number = bisect_left(finite.steps, first_step)
    before = finite.values[max(0, number - WINDOW) : number]
    within = norms.between(first_step, last_step).values
    if not before or not within or not median(before) > 0:
        return None
    largest = max(math.inf if math.isnan(value) else value for value in within)
    return largest / median(before)


def _is_unstable(spike: Spike) -> bool:
    is_large = spike.norm_ratio is None or spike.norm_ratio > NORM_RATIO
    return is_large and spike.num_rows >= LASTING


def _count(spikes: Sequence[Spike]) -> str:
    return "the loss spikes once" if len(spikes) == 1 else f"the loss spikes {len(spikes)} times"


def _describe(loss: Curve, spikes: Sequence[Spike]) -> tuple[Evidence, ...]:
    """Return the three largest spikes as evidence, in order of steps."""
    largest = sorted(sorted(spikes, key=lambda spike: spike.normal - spike.value)[:3], key=lambda spike: spike.step)
    found = []
    for spike in largest:
        found.append(Evidence(f"{loss.name}, normally {spike.normal:.4g},", spike.value, spike.step, spike.step))
        if spike.norm_ratio is not None:
            found.append(Evidence("gradient norm over its median", spike.norm_ratio, spike.step, spike.step))
    return tuple(found)
