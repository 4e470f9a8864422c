"""Symptoms in the gradients: clipping at every step, a rising norm, float16 overflow, skipped steps."""

import math
from statistics import mean, median

from .curve import Curve, standard_error, trend
from .finding import Cause, Evidence, Finding, medians
from .run import Run

MIN_POINTS = 30
CLIPPED = 0.95  # fraction of steps in the second half of the run; clipping only outliers stays below 0.5
# minimum ratio of norm to threshold: a ResNet clipped to a fifth of its norm at every step still learns normally
MIN_NORM_RATIO = 10.0
GROWTH = 3.0  # factor by which the norm grows over the last two thirds of the run
RISING = 0.7  # Kendall's tau of ten block medians: noise alone exceeds it in one run of 300
FALL_OF_LOSS = 0.01  # relative; if the loss falls by more, a growing norm is no reason for a warning
HALVINGS = 6  # of the loss scale, net: 65,536 settles after two or three
MIN_OVERFLOWS = 6
OVERFLOWS = 0.05  # fraction of steps: GradScaler doubles its scale every 2,000 steps, so one in 2,000 is normal
SKIPPED = 0.01  # fraction of steps


def find_constant_clipping(run: Run) -> Finding | None:
    """Detect gradients that are clipped at almost every step to far below their norm."""
    fractions = run.curves["clipped_fraction"].finite
    if len(fractions) < MIN_POINTS:
        return None
    late_fractions = fractions.part(0.5, 1)
    clipped = mean(late_fractions.values)
    if clipped < CLIPPED:
        return None
    threshold, norms = _get_threshold(run), run.curves["grad_norm"].finite
    if threshold is None or not len(norms):
        return None
    late_norms = norms.part(0.5, 1).block()
    norm = late_norms.median
    if norm < MIN_NORM_RATIO * threshold:
        return None
    limit = f"{2 * norm:.2g}"
    return Finding(
        severity="warning",
        meaning=(
            "almost every gradient is clipped to a small fraction of its norm: its magnitude is lost,"
            " and with SGD the threshold, not the gradient, sets the step size"
        ),
        evidence=(
            Evidence(f"mean of {fractions.name}", clipped, late_fractions.steps[0], late_fractions.steps[-1]),
            *medians(norms, late_norms),
            Evidence("clipped to", threshold, late_norms.first_step, late_norms.last_step),
        ),
        causes=(
            Cause(
                "the threshold is below the usual norm",
                run.suggest(f"trainer.gradient_clip_val={limit}", f"clip at {limit}, twice the median norm"),
            ),
            Cause(
                "the threshold was chosen for another model or batch size",
                run.suggest("clipping=quantile trainer.gradient_clip_val=null", "clip at a quantile of recent norms"),
            ),
            Cause(
                "the loss is summed over tokens instead of averaged",
                run.suggest("debug=overfit", "check what the loss is divided by: samples, tokens, micro-batches"),
            ),
        ),
    )


def _get_threshold(run: Run) -> float | None:
    curve = run.curves.get("clip_threshold")
    if curve is not None and len(curve.finite):
        return median(curve.finite.values)
    return run.number("trainer.gradient_clip_val") or run.number("gradient_clip_val")


def find_rising_norm(run: Run) -> Finding | None:
    """Detect a gradient norm that keeps growing while the loss does not fall."""
    norms, loss = run.curves["grad_norm"].finite, run.curves["loss"].finite
    if len(norms) < 2 * MIN_POINTS or len(loss) < 2 * MIN_POINTS:
        return None
    late = norms.part(1 / 3, 1)
    blocks = late.blocks(10)
    first, last = blocks[0], blocks[-1]
    if first.median <= 0 or last.median < GROWTH * first.median or trend([block.median for block in blocks]) < RISING:
        return None
    late_loss = loss.between(late.steps[0], late.steps[-1])
    if len(late_loss) < MIN_POINTS:
        return None
    before, after = late_loss.part(0, 0.2).block(), late_loss.part(0.8, 1).block()
    error = standard_error(loss.noise, before.num_points, after.num_points)
    if before.median - after.median > max(2 * error, FALL_OF_LOSS * abs(before.median)):
        return None
    return Finding(
        severity="warning",
        meaning="the gradient norm grows and the loss does not fall: divergence is near",
        evidence=(*medians(norms, first, last), *medians(loss, before, after)),
        causes=(
            Cause(
                "the learning rate is too high",
                run.suggest(run.scaled_override("optimizer.lr", 0.3), "a third of the learning rate"),
            ),
            Cause(
                "weights or logits grow without bound",
                run.suggest("z_loss=1e-4", "add a z-loss of 1e-4; log the norm of the logits"),
            ),
            Cause(
                "the precision is too low",
                run.suggest("precision=32-true", "repeat the last steps in float32"),
            ),
        ),
    )


def find_collapsing_scale(run: Run) -> Finding | None:
    """Detect a float16 loss scale that keeps being halved: gradients overflow and steps are skipped."""
    scale = run.curves["loss_scale"].finite
    positive = [value for value in scale.values if value > 0]
    if len(positive) < 3:
        return None
    halvings = math.log2(max(positive) / positive[-1])
    late = scale.part(0.5, 1)
    still_falling = late.values[-1] < late.values[0]
    lost = _count_lost(run.curves.get("overflow_steps"))
    steps = run.last_step - run.first_step + 1
    has_collapsed = halvings >= HALVINGS and (still_falling or positive[-1] <= 2)
    overflows_often = lost is not None and lost > max(MIN_OVERFLOWS, OVERFLOWS * steps)
    if not (has_collapsed or overflows_often):
        return None
    largest = scale.values.index(max(positive))
    evidence = [
        Evidence(f"largest {scale.name}", max(positive), scale.steps[largest], scale.steps[largest]),
        Evidence(f"last {scale.name}", positive[-1], scale.steps[-1], scale.steps[-1]),
    ]
    if lost is not None:
        evidence.append(Evidence("steps lost to overflow", lost, run.first_step, run.last_step))
    return Finding(
        severity="critical",
        meaning="gradients overflow float16 again and again: the loss scale is halved each time, and the step is lost",
        evidence=tuple(evidence),
        causes=(
            Cause(
                "the model needs the range of bfloat16 or float32",
                run.suggest("precision=bf16-mixed", "bfloat16, or float32 for a hundred steps"),
            ),
            Cause(
                "one operation gives NaN or inf, whatever the scale",
                run.suggest("precision=32-true debug=nan", "torch.autograd.set_detect_anomaly(True) in float32"),
            ),
            Cause(
                "the loss is a sum, or multiplied by a large weight",
                run.suggest("z_loss=0", "remove the extra term; divide the loss by its number of targets"),
            ),
        ),
    )


def find_skipped_steps(run: Run) -> Finding | None:
    """Detect steps that a callback skipped or rolled back, and non-finite losses that the run recovered from."""
    loss = run.curves["loss"]
    steps = run.last_step - run.first_step + 1
    evidence = []
    for role, event, what in (("skipped_steps", "skip", "skipped steps"), ("rollbacks", "rollback", "rollbacks")):
        at = [
            step for entry in run.events if entry.get("event") == event and isinstance(step := entry.get("step"), int)
        ]
        lost = _count_lost(run.curves.get(role))
        lost = float(len(at)) if lost is None else lost
        if lost > (0 if role == "rollbacks" else max(2.0, SKIPPED * steps)):
            first, last = (min(at), max(at)) if at else (run.first_step, run.last_step)
            evidence.append(Evidence(what, lost, first, last))
    broken = [step for step, value in zip(loss.steps, loss.values, strict=True) if not math.isfinite(value)]
    if broken and broken[-1] != loss.steps[-1]:
        evidence.append(Evidence(f"rows of {loss.name} that are NaN or inf", len(broken), broken[0], broken[-1]))
    if not evidence:
        return None
    return Finding(
        severity="warning",
        meaning="steps were skipped, rolled back or had no finite loss: the run continues, but something is wrong",
        evidence=tuple(evidence),
        causes=(
            Cause(
                "a batch that gives NaN, inf or an extreme loss",
                run.suggest(f"mode=replay {run.resume}", "save such a batch and repeat its forward pass in float32"),
            ),
            Cause(
                "the learning rate is too high",
                run.suggest(run.scaled_override("optimizer.lr", 0.5), "half the learning rate"),
            ),
        ),
    )


def _count_lost(curve: Curve | None) -> float | None:
    """Return the last value of a cumulative counter; None if it is not logged."""
    return None if curve is None or not len(curve.finite) else curve.finite.values[-1]
