"""Symptoms at epoch boundaries: a sudden drop of the loss, and batches that repeat in the same order."""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from .curve import ERROR_OF_MEDIAN, spread
from .finding import Cause, Evidence, Finding
from .run import Run

MIN_EPOCHS = 3
MIN_ROWS = 12  # per epoch: with fewer, a boundary cannot be compared with the inside of the epoch
# A jump of the loss at a boundary counts if it is at least this fraction of the loss, differs from jumps inside epochs
# by four standard errors, and has the same sign at four boundaries in five.
STEP_OF_LOSS, ERRORS, AGREEING = 0.05, 4.0, 0.8
# Correlation of rows at the same position in consecutive epochs: zero within six standard errors if the order is new; a
# quarter if one batch in several accounts for the loss.
MIN_CORRELATION, CORRELATION_ERRORS = 0.25, 6.0
CLIP = 3.0  # standard deviations: a single spike must not cause a correlation


def find_memorizing(run: Run) -> Finding | None:
    """Detect a loss that drops at each epoch boundary: the model has memorized the repeated samples."""
    boundary = _compare_boundaries(run)
    if boundary is None or boundary[0] > -STEP_OF_LOSS:
        return None
    (step, inside), starts = boundary, run.epoch_starts
    if inside > STEP_OF_LOSS / 2 or _is_repeated(run)[0]:  # caused by the order, see below
        return None
    return Finding(
        severity="warning",
        meaning="the loss drops whenever an epoch begins: the model memorizes the samples it has seen",
        evidence=(
            Evidence("median step at a boundary, of the loss,", step, starts[0], starts[-1]),
            Evidence("median step inside an epoch, of the loss,", inside, starts[0], starts[-1]),
        ),
        causes=(
            Cause(
                "too little data for this model, or too many epochs",
                run.suggest(
                    run.setting("callbacks.early_stop.patience", 3),
                    "compare the validation loss at the end of each epoch",
                ),
            ),
            Cause(
                "no regularization",
                run.suggest(run.setting("model.dropout", 0.1), "dropout, weight decay, augmentation"),
            ),
        ),
    )


def find_repeated_order(run: Run) -> Finding | None:
    """Detect batches that come in the same order in every epoch, or sorted by kind."""
    loss = run.curves["loss"].finite
    is_repeated, correlation = _is_repeated(run)
    boundary = _compare_boundaries(run)
    is_stepped = boundary is not None and (
        boundary[0] >= STEP_OF_LOSS or (boundary[0] <= -STEP_OF_LOSS and boundary[1] > STEP_OF_LOSS / 2)
    )
    if not (is_stepped or is_repeated):
        return None
    first, last = loss.steps[0], loss.steps[-1]
    evidence = [Evidence("correlation of the loss with that of the epoch before", correlation, first, last)]
    if is_stepped and boundary is not None:
        evidence.append(Evidence("median step at a boundary, of the loss,", boundary[0], first, last))
    return Finding(
        severity="critical",
        meaning="the loss repeats its course in every epoch: the batches come in the same order, or sorted",
        evidence=tuple(evidence),
        causes=(
            Cause(
                "the order of the samples is not shuffled, or they are sorted by class, length or source",
                run.suggest("seed=2", "`shuffle=True` in the DataLoader; print the classes of ten batches in a row"),
            ),
            Cause(
                "each epoch is shuffled with the same seed",
                run.suggest("seed=3", "call `sampler.set_epoch(epoch)`; print the first sample of each epoch"),
            ),
        ),
    )


def _is_repeated(run: Run) -> tuple[bool, float]:
    """Return whether the rows of an epoch correlate with those of the previous epoch, and the correlation.

    Rows are taken relative to the median of neighboring rows, to remove trends, and rows near a boundary are excluded,
    to ignore a jump there.
    """
    loss = run.curves["loss"].finite
    edges = [0, *(bisect_left(loss.steps, step) for step in run.epoch_starts), len(loss)]
    usual = median(b - a for a, b in pairwise(edges))
    if len(edges) <= MIN_EPOCHS or usual < MIN_ROWS:
        return False, 0.0
    reach = max(3, int(usual // 8))
    epochs = [
        _around_median(loss.values, first + reach, end - reach, reach)
        for first, end in pairwise(edges)
        if abs(end - first - usual) <= max(1, 0.02 * usual)  # in a partial epoch, rows are at other positions
    ]
    pairs = [pair for one, other in pairwise(epochs) for pair in zip(one, other, strict=False)]
    size = math.sqrt(sum(a * a for a, _ in pairs) * sum(b * b for _, b in pairs))
    if not size:
        return False, 0.0
    correlation = sum(a * b for a, b in pairs) / size
    return correlation > max(MIN_CORRELATION, CORRELATION_ERRORS / math.sqrt(len(pairs))), correlation


def _around_median(values: Sequence[float], first: int, end: int, reach: int) -> list[float]:
    """Return the clipped distances of rows from the median of neighboring rows, in standard deviations."""
    window = sorted(values[first - reach : first + reach])
    distances = []
    for row in range(first, end):
        if row + reach < len(values):
            insort(window, values[row + reach])
        distances.append(values[row] - window[len(window) // 2])
        del window[bisect_left(window, values[row - reach])]
    center, width = median(distances or [0.0]), spread(distances)
    return [max(-CLIP, min(CLIP, (distance - center) / width)) if width else 0.0 for distance in distances]


def _compare_boundaries(run: Run) -> tuple[float, float] | None:
    """Return the median jump of the loss at boundaries and inside epochs, as fractions of the loss.

    None if there are too few boundaries, or if the two do not differ by more than noise.
    """
    loss = run.curves["loss"].finite
    if len(run.epoch_starts) < MIN_EPOCHS or len(loss) < MIN_ROWS * MIN_EPOCHS:
        return None
    edges = [bisect_left(loss.steps, step) for step in run.epoch_starts]
    size = median(b - a for a, b in pairwise(edges))
    if size < MIN_ROWS:
        return None
    width = min(30, int(size // 4))
    at_boundaries = [step for edge in edges if (step := _step_at(loss.values, edge, width)) is not None]
    inside = [
        step
        for edge in edges
        for part in (0.25, 0.5, 0.75)
        if (step := _step_at(loss.values, edge + round(part * size), width)) is not None
    ]
    if len(at_boundaries) < MIN_EPOCHS or len(inside) < MIN_EPOCHS:
        return None
    center, usual = median(at_boundaries), median(inside)
    error = ERROR_OF_MEDIAN * spread(inside) / math.sqrt(len(at_boundaries))  # the jumps themselves grow during the run
    agreeing = sum((step - usual) * (center - usual) > 0 for step in at_boundaries) / len(at_boundaries)
    if abs(center - usual) <= ERRORS * error or agreeing < AGREEING or abs(center - usual) < STEP_OF_LOSS:
        return None
    return center, usual


def _step_at(values: Sequence[float], edge: int, width: int) -> float | None:
    """Return the relative change of the median from before to after a row."""
    before, after = values[max(0, edge - width) : edge], values[edge : edge + width]
    if len(before) < width or len(after) < width:
        return None
    a, b = median(before), median(after)
    return 2 * (b - a) / (abs(a) + abs(b)) if a or b else None
