"""Symptoms in the training loss and learning rate: no learning, divergence, a poor warm-up or decay."""

import math
from statistics import median

from .curve import Curve, standard_error
from .finding import Cause, Evidence, Finding, Severity, medians
from .run import Run

MIN_POINTS = 30  # fewer cannot be split into blocks
# A loss is stuck if a fall by this fraction of its value can be ruled out by two standard errors. In healthy runs it
# falls by 10 % or more within 400 steps.
STUCK = 0.02
AT_CHANCE = 0.02  # relative distance to ln(classes), the loss of a uniform guess; untrained networks start within it
MIN_LEARNING_RATE = 1e-3  # fraction of the peak: below it, all remaining steps together do less than one at the peak
LEFT_OVER = 0.2  # fraction of the run below that rate: 4 % for a cosine decay to zero, 0.1 % for a linear one
# A lasting rise exceeds six standard deviations of a step, a tenth of the loss, and half of the preceding fall; for
# losses below zero, such as rewards and likelihoods, twice that fall, since their level shifts in healthy runs too.
RISE_IN_NOISE, RISE_OF_LOSS, RISE_OF_FALL = 6.0, 0.1, 0.5
RISE_OF_FALL_BELOW_ZERO = 2.0
SMOOTH = 5  # rows, so that a single bad batch is not a hump


def find_divergence(run: Run) -> Finding | None:
    """Detect a loss that ends as NaN or inf, or rises far above its minimum and stays there."""
    loss = run.curves["loss"]
    finite = loss.finite
    if len(loss) >= 3 and not any(map(math.isfinite, loss.values[-3:])):
        return _found_not_finite(run, loss)
    if len(finite) < MIN_POINTS or run.learns_from_rewards:
        return None
    blocks = finite.blocks(20)
    lowest = min(blocks, key=lambda block: block.median)
    after = blocks[blocks.index(lowest) + 1 :]
    if len(after) < 2:
        return None
    noise = finite.between(finite.steps[0], max(lowest.last_step, blocks[2].last_step)).noise
    rise = min(block.median for block in after[-2:]) - lowest.median
    fall = median(finite.values[:SMOOTH]) - lowest.median
    share = RISE_OF_FALL if lowest.median > 0 else RISE_OF_FALL_BELOW_ZERO
    if rise <= max(RISE_IN_NOISE * noise, RISE_OF_LOSS * abs(lowest.median), share * fall):
        return None
    evidence = (
        Evidence(f"lowest median of {loss.name}", lowest.median, lowest.first_step, lowest.last_step),
        Evidence(f"last median of {loss.name}", after[-1].median, after[-1].first_step, after[-1].last_step),
    )
    return Finding(
        severity="critical",
        meaning="the loss fell, then rose far above its minimum and stayed there: the weights were damaged",
        evidence=evidence,
        causes=_causes_of_divergence(run),
    )


def _found_not_finite(run: Run, loss: Curve) -> Finding:
    number = len(loss) - 1
    while number and not math.isfinite(loss.values[number - 1]):
        number -= 1
    evidence = [Evidence(loss.name, loss.values[number], loss.steps[number], loss.steps[-1])]
    if number:
        evidence.insert(0, Evidence(f"last finite {loss.name}", loss.values[number - 1], *[loss.steps[number - 1]] * 2))
    return Finding(
        severity="critical",
        meaning="the loss became NaN or inf and stayed so: nothing after that step is usable",
        evidence=tuple(evidence),
        causes=_causes_of_divergence(run),
    )


def _causes_of_divergence(run: Run) -> tuple[Cause, ...]:
    return (
        Cause(
            "the learning rate is too high",
            run.suggest(run.scaled_override("optimizer.lr", 0.3), "a third of the learning rate"),
        ),
        Cause(
            "large gradients are not clipped",
            run.suggest(
                "trainer.gradient_clip_val=1.0",
                "clip the gradient norm near its median of the healthy part",
            ),
        ),
        Cause(
            "warm-up too short for Adam's first estimates",
            run.suggest(run.scaled_override("warmup_steps", 4, at_least=100), "four times as many steps of warm-up"),
        ),
        Cause(
            "an operation overflows: log or division by zero, float16",
            run.suggest("debug=nan", "torch.autograd.set_detect_anomaly(True) from a checkpoint before the step"),
        ),
    )


def find_stuck_loss(run: Run) -> Finding | None:
    """Detect a loss that stays at its initial value or at that of a uniform guess."""
    loss = run.curves["loss"].finite
    if len(loss) < MIN_POINTS or loss.steps[-1] - loss.steps[0] < MIN_POINTS:
        return None
    num_first = min(20, len(loss) // 10)
    first, last = loss.part(0, num_first / len(loss)).block(), loss.part(0.5, 1).block()
    error = standard_error(loss.noise, first.num_points, last.num_points)
    is_still = abs(first.median - last.median) + 2 * error < STUCK * abs(first.median)
    evidence = [*medians(loss, first, last)]
    severity: Severity = "critical"
    at_chance = False
    if run.num_classes is not None:
        chance = math.log(run.num_classes)
        at_chance = abs(last.median - chance) + 2 * error < AT_CHANCE * chance
        evidence.append(Evidence(f"ln({run.num_classes:,}), a uniform guess,", chance, last.first_step, last.last_step))
        if first.median < (1 - 5 * AT_CHANCE) * chance and not at_chance:
            severity = "warning"  # already trained: it may have nothing left to learn
    if not (is_still or at_chance):
        return None
    rate, norm = run.curves.get("learning_rate"), run.curves.get("grad_norm")
    for curve in (rate, norm):
        if curve is not None and len(curve.finite):
            largest = max(curve.finite.values)
            evidence.append(Evidence(f"largest {curve.name}", largest, curve.steps[0], curve.steps[-1]))
    meaning = "the loss stays at its first value: nothing is learned"
    if at_chance:
        meaning = f"the loss stays at ln({run.num_classes:,}), that of a uniform guess: nothing is learned"
    return Finding(
        severity=severity,
        meaning=meaning,
        evidence=tuple(evidence),
        causes=_causes_of_stuck_loss(run),
    )


def _causes_of_stuck_loss(run: Run) -> tuple[Cause, ...]:
    """Return possible causes, starting with any that the curves prove."""
    rate = Cause(
        "the learning rate is zero or far too low",
        run.suggest("optimizer.lr=1e-3 scheduler=constant", "a constant rate of 1e-3 with Adam for 100 steps"),
    )
    frozen = Cause(
        "no gradient reaches the weights: frozen, detached, or not given to the optimizer",
        run.suggest(
            "+callbacks.grad_norm.per_block=true trainer.max_steps=20",
            "print the gradient norm of every parameter after backward()",
        ),
    )
    targets = Cause(
        "inputs and targets do not match: shuffled labels, a wrong shift, random data",
        run.suggest(
            "debug=overfit", "train on one batch until its loss is zero; print five samples with their targets"
        ),
    )
    norm = run.curves.get("grad_norm")
    rates = run.curves.get("learning_rate")
    if norm is not None and len(norm.finite) and max(norm.finite.values) == 0:
        return frozen, rate, targets
    # Adam moves a weight by about the learning rate per step: below 1e-8, the sum over any run is negligible
    if rates is not None and len(rates.finite) and max(rates.finite.values) < 1e-8:
        return rate, frozen, targets
    return targets, rate, frozen


def find_early_decay(run: Run) -> Finding | None:
    """Detect a learning rate that is near zero long before the end, while the loss was still falling."""
    rates, loss = run.curves["learning_rate"].finite, run.curves["loss"].finite
    if len(rates) < 3 or len(loss) < MIN_POINTS or not max(rates.values) > 0:
        return None
    peak = max(rates.values)
    alive = max(step for step, rate in zip(rates.steps, rates.values, strict=True) if rate >= MIN_LEARNING_RATE * peak)
    left_over = run.last_step - alive
    if left_over < LEFT_OVER * (run.last_step - run.first_step):
        return None
    before = loss.between(alive - left_over, alive)
    if len(before) < 10:
        return None
    earlier, later = before.part(0, 0.5).block(), before.part(0.5, 1).block()
    fall = earlier.median - later.median
    if fall <= 3 * standard_error(before.noise, earlier.num_points, later.num_points):
        return None
    last_rate = rates.values[-1]
    return Finding(
        severity="critical",
        meaning=f"the learning rate is near zero for the last {left_over:,} steps, and the loss was still falling",
        evidence=(
            Evidence(f"peak of {rates.name}", peak, *[rates.steps[rates.values.index(peak)]] * 2),
            Evidence(rates.name, last_rate, alive + 1, run.last_step),
            Evidence(f"fall of {loss.name}", fall, before.steps[0], before.steps[-1]),
        ),
        causes=(
            Cause(
                "the schedule is shorter than the run",
                run.suggest(
                    f"scheduler.num_steps={int(run.number('trainer.max_steps') or run.last_step)}",
                    f"a schedule of {run.last_step:,} steps; check whether it counts steps or epochs",
                ),
            ),
            Cause(
                "the scheduler is stepped more often than once per optimizer step",
                run.suggest("scheduler=constant", "call it once per optimizer step: `interval`, accumulation, ranks"),
            ),
        ),
    )


def find_short_warmup(run: Run) -> Finding | None:
    """Detect a hump in the loss during or right after the warm-up, or at the start if there is no warm-up."""
    rates, loss = run.curves["learning_rate"].finite, run.curves["loss"].finite
    if len(rates) < 3 or len(loss) < MIN_POINTS or not max(rates.values) > 0:
        return None
    peak = max(rates.values)
    reached = next(step for step, rate in zip(rates.steps, rates.values, strict=True) if rate >= 0.99 * peak)
    length = run.last_step - run.first_step
    warmup = reached - run.first_step
    if warmup > length / 3:  # the schedule keeps rising
        return None
    until = run.first_step + max(2 * warmup, length // 10)
    early = loss.between(run.first_step, until)
    hump = _find_hump(early)
    if hump is None:
        return None
    low, top, top_step = hump
    end = loss.part(0.8, 1).block()
    # same criteria as for a lasting rise: early losses are noisy, and small once a network has learned much
    fall = early.values[0] - low
    least = max(RISE_IN_NOISE * max(early.noise, loss.noise), RISE_OF_LOSS * abs(low), RISE_OF_FALL * fall)
    if top - low <= least or end.median >= low:
        return None
    return Finding(
        severity="warning",
        meaning="the loss rises when the learning rate reaches its peak, and recovers: steps were lost",
        evidence=(
            Evidence(f"{loss.name} before it", low, early.steps[0], top_step),
            Evidence(f"top of {loss.name}", top, top_step, top_step),
            Evidence(f"peak of {rates.name}", peak, reached, reached),
        ),
        causes=(
            Cause(
                "too few steps of warm-up",
                run.suggest(
                    f"warmup_steps={max(5 * warmup, int(length // 20), 20)}",
                    f"{max(5 * warmup, int(length // 20), 20):,} steps of linear warm-up; it took {warmup:,}",
                ),
            ),
            Cause(
                "the peak is too high",
                run.suggest(run.scaled_override("optimizer.lr", 0.3), f"a peak of {0.3 * peak:.2g}"),
            ),
            Cause("no clipping", run.suggest("trainer.gradient_clip_val=1.0", "clip the gradient norm at 1")),
        ),
    )


def _find_hump(loss: Curve) -> tuple[float, float, int] | None:
    """Return the low before the largest rise, its top and the step of the top, from minima of five neighbors."""
    values = [min(loss.values[i : i + SMOOTH]) for i in range(len(loss) - SMOOTH + 1)]
    if len(values) < 2:
        return None
    best: tuple[float, float, int] | None = None
    low = loss.values[0]
    for i, value in enumerate(values):
        if best is None or value - low > best[1] - best[0]:
            best = (low, value, loss.steps[i])
        low = min(low, max(loss.values[i : i + SMOOTH]))
    return best


def find_unfinished_decay(run: Run) -> Finding | None:
    """Detect a schedule that is longer than the finished run, so that the decay was never reached."""
    rates = run.curves["learning_rate"].finite
    planned, ran = run.number("scheduler.num_steps"), run.last_step
    if run.has("task.module"):  # a LightningModule, with a schedule of its own
        return None
    if planned is None or run.status != "finished" or len(rates) < 3 or planned < 1.25 * ran:
        return None
    peak, last = max(rates.values), rates.values[-1]
    if last < 0.5 * peak:
        return None
    return Finding(
        severity="note",
        meaning=f"the schedule has {int(planned):,} steps and the run {ran:,}: it ended at a high learning rate",
        evidence=(
            Evidence(f"peak of {rates.name}", peak, *[rates.steps[rates.values.index(peak)]] * 2),
            Evidence(f"last {rates.name}", last, rates.steps[-1], rates.steps[-1]),
        ),
        causes=(
            Cause(
                "the schedule was not shortened with the run",
                run.suggest(f"scheduler.num_steps={ran}", f"a schedule of {ran:,} steps"),
            ),
            Cause(
                "the run is the first part of a longer one",
                run.suggest(f"{run.resume} trainer.max_steps={int(planned)}", "resume it"),
            ),
        ),
    )
