"""Heuristics that detect bottlenecks; each requires all of the most recent samples to agree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

KINDS = ("data", "slow_rank", "sync", "small_batch", "slower")
NUM_SAMPLES = 5  # consecutive samples that must show a bottleneck
MIN_SECONDS = 10.0  # of training time covered by these samples; less may be noise
DATA_WAIT_THRESHOLD = 0.10  # fraction of a step
SLOW_RANK_RATIO = 1.25  # forward time relative to the median of the other ranks
SYNC_THRESHOLD = 0.25  # fraction of a step
SLOWDOWN_RATIO = 1.5  # step time relative to the run's best
FREE_MEMORY_THRESHOLD = 0.6  # fraction of the device's memory


@dataclass(frozen=True, kw_only=True)
class BottleneckSample:
    """Measurements between two logged steps; per-rank values are tuples indexed by rank.

    Attributes:
        step: Optimizer steps completed.
        seconds: Training time since the previous sample.
        step_seconds: Time of one optimizer step.
        data_wait_fraction: Fraction of the step time spent waiting for data, by rank.
        forward_seconds: Time of one micro-batch's forward pass, by rank; empty if that pass contains collectives, as
            under FSDP and ZeRO-3.
        sync_seconds: Extra time of a backward pass that synchronizes gradients over one that does not; None if every
            pass synchronizes.
        free_memory_fraction: Fraction of the device's memory that the allocator never reserved; None if unknown.
        num_micro_batches: Micro-batches per optimizer step.
        mfu: Model FLOPs utilization; None if unknown.
    """

    step: int
    seconds: float
    step_seconds: float
    data_wait_fraction: tuple[float, ...]
    forward_seconds: tuple[float, ...] = ()
    sync_seconds: float | None = None
    free_memory_fraction: float | None = None
    num_micro_batches: int = 1
    mfu: float | None = None


@dataclass(frozen=True)
class Bottleneck:
    """A detected bottleneck and its symptom in one sentence."""

    kind: str
    message: str


def find_bottlenecks(samples: Sequence[BottleneckSample], *, best: BottleneckSample | None) -> Iterator[Bottleneck]:
    """Yield each bottleneck that all of the latest samples show; yield nothing if there are too few samples.

    Args:
        samples: In chronological order.
        best: The fastest `median_sample` of this run so far; None if there is none yet.
    """
    latest = samples[-NUM_SAMPLES:]
    if len(latest) < NUM_SAMPLES or sum(sample.seconds for sample in latest) < MIN_SECONDS:
        return
    yield from _check_data_wait(latest)
    yield from _check_slow_rank(latest)
    yield from _check_sync(latest)
    yield from _check_free_memory(latest)
    yield from _check_slowdown(latest, best)


def median_sample(samples: Sequence[BottleneckSample]) -> BottleneckSample | None:
    """Return the sample with the median step time among the latest; None if there are too few."""
    latest = samples[-NUM_SAMPLES:]
    if len(latest) < NUM_SAMPLES:
        return None
    return sorted(latest, key=lambda sample: sample.step_seconds)[NUM_SAMPLES // 2]


def _check_data_wait(samples: Sequence[BottleneckSample]) -> Iterator[Bottleneck]:
    if min(max(sample.data_wait_fraction) for sample in samples) <= DATA_WAIT_THRESHOLD:
        return
    fraction = median(max(sample.data_wait_fraction) for sample in samples)
    yield Bottleneck("data", f"{fraction:.0%} of each step is spent waiting for data")


def _check_slow_rank(samples: Sequence[BottleneckSample]) -> Iterator[Bottleneck]:
    if any(len(sample.forward_seconds) < 2 or min(sample.forward_seconds) <= 0 for sample in samples):
        return
    slowest = {sample.forward_seconds.index(max(sample.forward_seconds)) for sample in samples}
    if len(slowest) > 1:  # not the same rank in every sample
        return
    [rank] = slowest
    ratios = [sample.forward_seconds[rank] / _median_of_others(sample, rank) for sample in samples]
    if min(ratios) > SLOW_RANK_RATIO:
        message = f"rank {rank}'s forward pass takes {median(ratios):.2g} times as long as the other ranks'"
        yield Bottleneck("slow_rank", message)


def _median_of_others(sample: BottleneckSample, rank: int) -> float:
    return median(value for r, value in enumerate(sample.forward_seconds) if r != rank)


def _check_sync(samples: Sequence[BottleneckSample]) -> Iterator[Bottleneck]:
    fractions = [sample.sync_seconds / sample.step_seconds for sample in samples if sample.sync_seconds is not None]
    if len(fractions) == NUM_SAMPLES and min(fractions) > SYNC_THRESHOLD:
        message = f"{median(fractions):.0%} of each step is spent synchronizing gradients across ranks"
        yield Bottleneck("sync", message)


def _check_free_memory(samples: Sequence[BottleneckSample]) -> Iterator[Bottleneck]:
    """Detect enough unused memory for fewer, larger micro-batches: the same global batch with larger matmuls."""
    free = [sample.free_memory_fraction for sample in samples if sample.free_memory_fraction is not None]
    if len(free) == NUM_SAMPLES and min(free) > FREE_MEMORY_THRESHOLD and samples[-1].num_micro_batches > 1:
        count = samples[-1].num_micro_batches
        message = f"each step uses {count} micro-batches although {min(free):.0%} of the device's memory is free"
        yield Bottleneck("small_batch", message)


def _check_slowdown(samples: Sequence[BottleneckSample], best: BottleneckSample | None) -> Iterator[Bottleneck]:
    if best is None or min(sample.step_seconds for sample in samples) < SLOWDOWN_RATIO * best.step_seconds:
        return
    current_seconds = median(sample.step_seconds for sample in samples)
    message = f"steps take {current_seconds:.3g} s; around step {best.step} they took {best.step_seconds:.3g} s"
    if best.mfu is not None and samples[-1].mfu is not None:
        message += f" (MFU {samples[-1].mfu:.3f}, was {best.mfu:.3f})"
    yield Bottleneck("slower", message)
