"""Rules for what slows a run down, reported only where the newest rows leave no doubt. Plain arithmetic."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

NUM_ROWS = 5  # rows that must agree
MIN_SECONDS = 10.0  # of training in these rows: anything shorter may be a hiccup
DATA_WAIT = 0.10  # fraction of a step
SLOW_RANK = 1.25  # times the other ranks' forward pass
SYNC = 0.25  # fraction of a step
SLOWER = 1.5  # times the best step time of the run
_FREE = 0.6  # fraction of the device's memory


@dataclass(frozen=True, kw_only=True)
class BottleneckSample:
    """The values of one row; those of all ranks are tuples.

    Attributes:
        step: Optimizer steps completed.
        seconds: Training time since the previous row.
        step_seconds: Time of one optimizer step.
        data_wait: Fraction of it spent waiting for data, by rank.
        forward_seconds: Time of one micro-batch's forward pass, by rank; empty where that pass itself waits for
            other ranks.
        sync_seconds: By how much the backward pass that reduces gradients is longer than one that does not; None
            where every pass reduces.
        free_memory: Fraction of the device's memory that was never reserved; None where unknown.
        num_micro_batches: Micro-batches per optimizer step.
        mfu: Model FLOPs utilization; None where unknown.
    """

    step: int
    seconds: float
    step_seconds: float
    data_wait: tuple[float, ...]
    forward_seconds: tuple[float, ...] = ()
    sync_seconds: float | None = None
    free_memory: float | None = None
    num_micro_batches: int = 1
    mfu: float | None = None


@dataclass(frozen=True)
class Finding:
    """One cause, and its symptom in one sentence."""

    kind: str
    text: str


def findings(rows: Sequence[BottleneckSample], *, best: BottleneckSample | None) -> Iterator[Finding]:
    """Yield the causes that all of the newest rows agree on; none while there are too few rows.

    Args:
        rows: The newest last.
        best: The fastest typical row of this run so far; None before there is one.
    """
    newest = rows[-NUM_ROWS:]
    if len(newest) < NUM_ROWS or sum(row.seconds for row in newest) < MIN_SECONDS:
        return
    yield from _data(newest)
    yield from _slow_rank(newest)
    yield from _sync(newest)
    yield from _small_batch(newest)
    yield from _slower(newest, best)


def typical(rows: Sequence[BottleneckSample]) -> BottleneckSample | None:
    """Return the row with the median step time among the newest; None while there are too few."""
    newest = rows[-NUM_ROWS:]
    if len(newest) < NUM_ROWS:
        return None
    return sorted(newest, key=lambda row: row.step_seconds)[NUM_ROWS // 2]


def _data(rows: Sequence[BottleneckSample]) -> Iterator[Finding]:
    if min(max(row.data_wait) for row in rows) <= DATA_WAIT:
        return
    fraction = median(max(row.data_wait) for row in rows)
    yield Finding("data", f"{fraction:.0%} of each step is spent waiting for data")


def _slow_rank(rows: Sequence[BottleneckSample]) -> Iterator[Finding]:
    if any(len(row.forward_seconds) < 2 or min(row.forward_seconds) <= 0 for row in rows):
        return
    slowest = {row.forward_seconds.index(max(row.forward_seconds)) for row in rows}
    rank = slowest.pop()
    if slowest:  # another rank in another row
        return
    ratios = [row.forward_seconds[rank] / _median_of_others(row, rank) for row in rows]
    if min(ratios) > SLOW_RANK:
        text = f"rank {rank} takes {median(ratios):.2g} times as long for a forward pass as the others"
        yield Finding("slow_rank", text)


def _median_of_others(row: BottleneckSample, rank: int) -> float:
    return median(value for r, value in enumerate(row.forward_seconds) if r != rank)


def _sync(rows: Sequence[BottleneckSample]) -> Iterator[Finding]:
    fractions = [row.sync_seconds / row.step_seconds for row in rows if row.sync_seconds is not None]
    if len(fractions) == NUM_ROWS and min(fractions) > SYNC:
        text = f"{median(fractions):.0%} of each step is spent reducing gradients between ranks"
        yield Finding("sync", text)


def _small_batch(rows: Sequence[BottleneckSample]) -> Iterator[Finding]:
    """Find micro-batches that could be fewer and larger: the same global batch, larger matrix products."""
    free = [row.free_memory for row in rows if row.free_memory is not None]
    if len(free) == NUM_ROWS and min(free) > _FREE and rows[-1].num_micro_batches > 1:
        count = rows[-1].num_micro_batches
        text = f"a step takes {count} micro-batches and {min(free):.0%} of the device's memory is free"
        yield Finding("small_batch", text)


def _slower(rows: Sequence[BottleneckSample], best: BottleneckSample | None) -> Iterator[Finding]:
    if best is None or min(row.step_seconds for row in rows) < SLOWER * best.step_seconds:
        return
    now = median(row.step_seconds for row in rows)
    text = f"steps take {now:.3g} s; around step {best.step} they took {best.step_seconds:.3g} s"
    if best.mfu is not None and rows[-1].mfu is not None:
        text += f" (MFU {rows[-1].mfu:.3f}, was {best.mfu:.3f})"
    yield Finding("slower", text)
