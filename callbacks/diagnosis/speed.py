"""Symptoms in speed and memory: a steady slowdown, waiting for data, growing memory."""

from itertools import pairwise
from statistics import quantiles

from .curve import Curve, scatter_around_line, trend
from .finding import Cause, Evidence, Finding, medians
from .run import Run

MIN_POINTS = 40
SKIPPED_START = 0.1  # fraction of rows ignored, while caches fill and kernels are selected
NUM_BLOCKS = 8
SLOWER = 0.1  # relative loss of speed
STEADY = 0.7  # Kendall's tau over eight parts: noise alone exceeds it in one run of 100
ABOVE_SCATTER = 3.0  # in units of the parts' scatter around a line
ONE_STEP = 0.6  # of the lost speed, between two neighboring parts: other jobs on the machine start abruptly
WAITING = 0.1  # fraction of a step, in three rows of four; the threshold of BottleneckMonitor
GROWTH = 0.1  # relative growth of memory over the second half of the run
GROWTH_GIB = 0.1
GROWING_PARTS = 4  # out of five


def find_slowdown(run: Run) -> Finding | None:
    """Detect a speed that decreases steadily over the run."""
    curve, sign = _get_speed(run)
    if curve is None or len(curve) < MIN_POINTS:
        return None
    blocks = curve.part(SKIPPED_START, 1).blocks(NUM_BLOCKS)
    speeds = [block.median if sign > 0 else 1 / block.median for block in blocks]
    lost = 1 - speeds[-1] / speeds[0]
    scatter = scatter_around_line(speeds) / speeds[0]
    largest = max(before - after for before, after in pairwise(speeds)) / speeds[0]
    if lost < SLOWER or trend(speeds) > -STEADY or lost < ABOVE_SCATTER * scatter or largest > ONE_STEP * lost:
        return None
    evidence = medians(curve, blocks[0], blocks[-1])
    wait = run.curves.get("data_wait")
    if wait is not None and len(wait.finite) >= MIN_POINTS:
        evidence += medians(wait, wait.finite.part(0.9, 1).block())
    return Finding(
        severity="warning",
        meaning=f"the run lost {lost:.0%} of its speed, little by little: something grows with its length",
        evidence=evidence,
        causes=(
            Cause(
                "the data source becomes slower: a list that is searched, a file read from its start, a full cache",
                run.suggest("loader.num_workers=4", "time the loader alone, over as many batches"),
            ),
            Cause(
                "something is kept from every step: graphs, losses with their graph, logs",
                run.suggest("profile_steps=3", "profile a step at the start and one at the end; log `.item()`"),
            ),
            Cause("the device gets hot, or other work begins", "watch its clock and temperature: `nvidia-smi dmon`"),
        ),
    )


def _get_speed(run: Run) -> tuple[Curve | None, int]:
    """Return the speed or step time curve and the sign of better: 1 if higher is better, else -1."""
    for role, sign in (("speed", 1), ("step_seconds", -1)):
        curve = run.curves.get(role)
        if curve is not None and len(curve.finite) and min(curve.finite.values) > 0:
            return curve.finite, sign
    return None, 1


def find_data_wait(run: Run) -> Finding | None:
    """Detect a run that waits for data in most of its steps."""
    wait = run.curves["data_wait"].finite
    if len(wait) < MIN_POINTS:
        return None
    half = wait.part(0.5, 1)
    lower = quantiles(half.values, n=4)[0]
    if lower < WAITING:
        return None
    typical = half.block()
    workers = run.number("loader.num_workers")
    return Finding(
        severity="warning",
        meaning=f"{typical.median:.0%} of a step is spent waiting for data: the device is idle meanwhile",
        evidence=(
            *medians(wait, typical),
            Evidence(f"lower quartile of {wait.name}", lower, half.steps[0], half.steps[-1]),
        ),
        causes=(
            Cause(
                "too few loader processes",
                run.suggest(
                    f"loader.num_workers={int(2 * workers) if workers else 4}",
                    "num_workers=4 or more, persistent_workers=True",
                ),
            ),
            Cause(
                "samples are decoded, tokenized or augmented at every use",
                run.suggest("data=random_tokens", "random tensors as data: with the wait gone, it is the source"),
            ),
            Cause("a slow disk or network", "copy the data to a local disk"),
        ),
    )


def find_growing_memory(run: Run) -> Finding | None:
    """Detect memory that keeps growing throughout the second half of the run."""
    for role in ("device_memory", "memory"):
        curve = run.curves.get(role)
        if curve is None or len(curve.finite) < MIN_POINTS:
            continue
        blocks = curve.finite.part(0.4, 1).blocks(6)
        first, last = blocks[0], blocks[-1]
        growth = last.median - first.median
        steps_up = sum(b.median > a.median + 0.05 * growth for a, b in pairwise(blocks))
        if growth < max(GROWTH * first.median, GROWTH_GIB) or steps_up < GROWING_PARTS:
            continue
        return Finding(
            severity="warning",
            meaning="memory keeps growing throughout the run: it will run out",
            evidence=medians(curve, first, last),
            causes=(
                Cause(
                    "a list of losses or outputs that keeps their graphs",
                    run.suggest(
                        "callbacks=[grad_norm,memory] callbacks.memory.record_history=true",
                        "append `loss.item()`, not `loss`; clear lists at the end of an epoch",
                    ),
                ),
                Cause(
                    "loader processes copy a large Python list, page by page",
                    run.suggest("loader.num_workers=0", "num_workers=0; hold the list as an array"),
                ),
            ),
        )
    return None
