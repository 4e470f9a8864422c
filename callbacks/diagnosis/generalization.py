"""Symptoms in the validation loss: overfitting, a validation split that is too easy, no validation at all."""

import math
from bisect import bisect_right
from statistics import median

from .curve import SIGMA_PER_MAD, Curve, standard_error
from .finding import Cause, Evidence, Finding, medians
from .run import Run

MIN_VALIDATIONS = 4
# Overfitting: in the last two validations the loss exceeds its minimum by this fraction and by four times the noise;
# smaller rises come and go in healthy runs.
RISE, NOISE = 0.05, 4.0
# Too easy: all later validations are better by this fraction of the training loss; two fair splits of a few hundred
# samples, and the lag of an epoch average, differ by less.
EASIER = 0.1
NEAREST = 40  # maximum training rows to compare with a validation


def find_overfitting(run: Run) -> Finding | None:
    """Detect a validation loss that rises again while the training loss still falls."""
    val, train = run.curves["val_loss"].finite, run.curves["loss"].finite
    if len(val) < MIN_VALIDATIONS or len(train) < 2 * MIN_VALIDATIONS:
        return None
    lowest = min(range(len(val)), key=lambda number: val.values[number])
    if lowest > len(val) - 3:
        return None
    best, best_step = val.values[lowest], val.steps[lowest]
    last = min(val.values[-2:])
    if last - best <= max(RISE * abs(best), NOISE * noise_of_validations(val)):
        return None
    before, after = _near(train, best_step).block(), _near(train, val.steps[-1]).block()
    error = standard_error(train.noise, before.num_points, after.num_points)
    won = before.median - after.median
    # near zero, the remaining decrease of the training loss may be less than its noise
    if won <= 0 or (won < error and after.median > 0.5 * best):
        return None
    return Finding(
        severity="critical",
        meaning=f"since step {best_step:,} the validation loss rises and the training loss falls: it memorizes",
        evidence=(
            Evidence(f"lowest {val.name}", best, best_step, best_step),
            Evidence(f"last {val.name}", val.values[-1], val.steps[-1], val.steps[-1]),
            *medians(train, before, after),
        ),
        causes=(
            Cause(
                "more steps than the data supports",
                run.suggest(
                    f"trainer.max_steps={best_step}",
                    f"stop at the lowest validation loss, about step {best_step:,}",
                ),
            ),
            Cause(
                "too little data or regularization for a model of this size",
                run.suggest(
                    run.setting("model.dropout", 0.1), "dropout, weight decay, augmentation, more data, a smaller model"
                ),
            ),
            Cause(
                "validation data of another kind than the training data",
                run.suggest("debug=overfit", "validate on a random held-out part of the training files"),
            ),
        ),
    )


def find_easier_validation(run: Run) -> Finding | None:
    """Detect a validation loss below the training loss by more than noise, and not only at the start."""
    val, train = run.curves["val_loss"].finite, run.curves["loss"].finite
    if len(val) < MIN_VALIDATIONS or len(train) < 10 * MIN_VALIDATIONS:
        return None
    gaps, steps = [], []
    for step, value in list(zip(val.steps, val.values, strict=True))[len(val) // 2 :]:
        near = _near(train, step)
        level = median(near.values)
        # a mean over an epoch, or over rows in which the loss was still falling, lags behind
        lag = max(0.0, median(near.values[: len(near) // 2] or near.values) - level)
        error = standard_error(train.noise, len(near))
        gaps.append((level - value - lag - 2 * error) / abs(level) if level else 0.0)
        steps.append(step)
    if not gaps or min(gaps) <= EASIER:
        return None
    return Finding(
        severity="warning",
        meaning="validation is better than training by more than noise: the two losses do not measure the same thing",
        evidence=(
            *medians(train, _near(train, val.steps[-1]).block()),
            Evidence(f"last {val.name}", val.values[-1], val.steps[-1], val.steps[-1]),
            Evidence("smallest gap, of the training loss,", min(gaps), steps[0], steps[-1]),
        ),
        causes=(
            Cause(
                "dropout, augmentation, noise or label smoothing in training only: harmless",
                run.suggest("label_smoothing=0", "validate on training samples: with the same gap, it is this"),
            ),
            Cause(
                "the validation split is easier, or too small",
                run.suggest(
                    "eval_samples=null", "split at random, by source and date; compare two halves of the split"
                ),
            ),
            Cause(
                "validation samples are among the training samples",
                run.suggest(
                    f"mode=evaluate {run.resume}",
                    "search the training data for exact and near copies of ten of them",
                ),
            ),
        ),
    )


def find_no_validation(run: Run) -> Finding | None:
    """Detect a run with validations planned or logged, but without a single validation loss, or held-out reward."""
    measure = "held-out reward" if run.learns_from_rewards else "validation loss"
    val = run.curves.get("val_reward" if run.learns_from_rewards else "val_loss")
    every, has_ended = run.number("eval_every"), run.status not in (None, "running")
    loss = run.curves.get("loss")
    is_lost = loss is not None and not math.isfinite(loss.values[-1])  # diverged: validation would not be finite
    is_empty = val is not None and not len(val.finite) and not is_lost
    is_late = val is None and has_ended and every is not None and every > run.last_step
    if not (is_empty or is_late):
        return None
    if val is not None:
        evidence = Evidence(val.name, val.values[-1], val.steps[0], val.steps[-1])
    else:
        evidence = Evidence("eval_every", every or 0.0, run.first_step, run.last_step)
    return Finding(
        severity="warning" if is_empty else "note",
        meaning=f"there is no {measure}: overfitting and the best checkpoint remain unknown",
        evidence=(evidence,),
        causes=(
            Cause(
                "the interval is longer than the run, or the split is empty",
                run.suggest(f"eval_every={max(1, run.last_step // 10)}", "validate ten times a run"),
            ),
        ),
    )


def noise_of_validations(val: Curve) -> float:
    """Return the noise of single validations from second differences, which a smooth curve barely affects."""
    values = val.values
    seconds = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return SIGMA_PER_MAD * median(seconds) / 6**0.5 if seconds else 0.0


def _near(train: Curve, step: int) -> Curve:
    """Return the training rows up to a validation, at most 40 and at most a tenth of all rows."""
    end = max(1, bisect_right(train.steps, step))
    first = max(0, end - max(3, min(NEAREST, len(train) // 10)))
    return Curve(train.name, train.steps[first:end], train.values[first:end])
