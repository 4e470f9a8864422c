"""What slows a run down, where the numbers leave no doubt: plain arithmetic on the newest rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

NUM_ROWS = 5  # that must agree
MIN_SECONDS = 10.0  # of training in them: a shorter stretch may be a hiccup
DATA_WAIT = 0.10  # of a step
SLOW_RANK = 1.25  # times the others' forward pass
SYNC = 0.25  # of a step
SLOWER = 1.5  # times the best that the run has reached
_FREE = 0.6  # of a device's memory


@dataclass(frozen=True, kw_only=True)
class BottleneckSample:
    """What one row says; of all ranks, where there is a list.

    Attributes:
        step: Optimizer steps completed.
        seconds: Of training since the row before.
        step_seconds: Of one optimizer step.
        data_wait: Share of it spent waiting for data, by rank.
        forward_seconds: Of one micro-batch's forward pass, by rank; empty where it waits for other ranks itself.
        sync_seconds: By which the backward pass that reduces gradients is longer than one that does not; None: there
            is none that does not.
        free_memory: Share of the device's memory that was never taken; None: not known.
        num_micro_batches: Passes of an optimizer step.
        mfu: None: not known.
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
    """One cause and what it looks like, in one sentence."""

    kind: str
    text: str


def findings(
    rows: Sequence[BottleneckSample], *, best: BottleneckSample | None
) -> Iterator[Finding]:
    """What all of the newest rows agree on; nothing before there are enough of them.

    Args:
        rows: The newest last.
        best: The fastest that this run has been, over as many rows.
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
    """The row of the median step time among the newest; None before there are enough."""
    newest = rows[-NUM_ROWS:]
    if len(newest) < NUM_ROWS:
        return None
    return sorted(newest, key=lambda row: row.step_seconds)[NUM_ROWS // 2]


def _data(rows: Sequence[BottleneckSample]) -> Iterator[Finding]:
    if min(max(row.data_wait) for row in rows) <= DATA_WAIT:
        return
    share = median(max(row.data_wait) for row in rows)
    yield Finding("data", f"{share:.0%} of each step is spent waiting for data")


def _slow_rank(rows: Sequence[BottleneckSample]) -> Iterator[Finding]:
    if any(len(row.forward_seconds) < 2 or min(row.forward_seconds) <= 0 for row in rows):
        return
    slowest = {row.forward_seconds.index(max(row.forward_seconds)) for row in rows}
    rank = slowest.pop()
    if slowest:
        return
    ratios = [row.forward_seconds[rank] / _of_others(row, rank) for row in rows]
    if min(ratios) > SLOW_RANK:
        text = (
            f"rank {rank} takes {median(ratios):.2g} times as long for a forward pass as the others"
        )
        yield Finding("slow_rank", text)


def _of_others(row: BottleneckSample, rank: int) -> float:
    return median(value for r, value in enumerate(row.forward_seconds) if r != rank)


def _sync(rows: Sequence[BottleneckSample]) -> Iterator[Finding]:
    shares = [row.sync_seconds / row.step_seconds for row in rows if row.sync_seconds is not None]
    if len(shares) == NUM_ROWS and min(shares) > SYNC:
        text = f"{median(shares):.0%} of each step is spent on gradients between ranks"
        yield Finding("sync", text)


def _small_batch(rows: Sequence[BottleneckSample]) -> Iterator[Finding]:
    """Passes that could be one: the same global batch, larger products."""
    free = [row.free_memory for row in rows if row.free_memory is not None]
    if len(free) == NUM_ROWS and min(free) > _FREE and rows[-1].num_micro_batches > 1:
        passes = rows[-1].num_micro_batches
        text = f"a step takes {passes} passes and {min(free):.0%} of the device's memory is free"
        yield Finding("small_batch", text)


def _slower(rows: Sequence[BottleneckSample], best: BottleneckSample | None) -> Iterator[Finding]:
    if best is None or min(row.step_seconds for row in rows) < SLOWER * best.step_seconds:
        return
    now = median(row.step_seconds for row in rows)
    text = f"steps take {now:.3g} s; around step {best.step} they took {best.step_seconds:.3g} s"
    if best.mfu is not None and rows[-1].mfu is not None:
        text += f" (MFU {rows[-1].mfu:.3f}, was {best.mfu:.3f})"
    yield Finding("slower", text)
