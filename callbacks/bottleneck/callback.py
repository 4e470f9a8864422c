"""Report what slows a run down; costs a few clock readings per micro-batch and one all-gather per logged step."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from ..events import EventKind, log_event
from ..lightning_internals import get_callbacks
from ..lightning_packages import Callback, find_classes
from ..logged_step import StepCounter, is_logged_step
from ..ranks import gather_values
from ..throughput.callback import SpeedMonitor

# Heuristics that detect bottlenecks; each requires all of the most recent samples to agree.

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


log = logging.getLogger("lightning_recipes")


class BottleneckMonitor(Callback):
    """Reports when a run waits for data, a slow rank or gradient sync, leaves memory unused, or has slowed down.

    Safe to leave on: it logs nothing while nothing is wrong. Each cause is reported once, as a console line and a
    `diagnosis` event, and only after five logged steps in a row show it. It reads the metrics of a `SpeedMonitor`,
    which must precede it in the list of callbacks; without one it does nothing.

    Args:
        advice: Remedy to append to the report of each kind of bottleneck: `data`, `slow_rank`, `sync`, `small_batch`,
            `slower`; `{cores}` in it stands for the cores of this process. None appends nothing.

    Raises:
        ValueError: `advice` contains an unknown kind.

    Example:
        >>> monitors = [SpeedMonitor(), BottleneckMonitor(advice={"data": "raise num_workers"})]
        >>> trainer = Trainer(callbacks=monitors, accelerator="cpu", logger=False)
        >>> monitors[1].state_dict()["reported"]
        []
    """

    events: ClassVar[dict[str, EventKind]] = {"diagnosis": {"mark": "none"}}

    def __init__(self, *, advice: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._advice = dict(advice) if advice is not None else {}
        if unknown := self._advice.keys() - set(KINDS):
            raise ValueError(f"advice is about {sorted(unknown)}; the kinds are {', '.join(KINDS)}; leave others out")
        self.clock: Callable[[], float] = time.perf_counter
        self._steps = StepCounter()
        self._samples: list[BottleneckSample] = []
        self._best: BottleneckSample | None = None
        self._reported: set[str] = set()
        self._where = ""
        self._row_step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)
        self._speed = self._find_speed_monitor(trainer)
        self._phases = PhaseTimes(trainer.strategy.root_device, self.clock)
        self._samples, self._row_step = [], trainer.global_step
        where = f"{_device_name(trainer)} x {trainer.world_size}"
        if where != self._where:  # the best speed on other hardware is not comparable
            self._where, self._best = where, None

    def _find_speed_monitor(self, trainer: Trainer) -> SpeedMonitor | None:
        """Return the SpeedMonitor that runs before this callback and has thus already synchronized with the device."""
        for callback in get_callbacks(trainer):
            if isinstance(callback, SpeedMonitor):
                return callback
            if callback is self and trainer.is_global_zero:
                log.warning("BottleneckMonitor is off: it has no SpeedMonitor before it")
                return None
        return None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._speed is not None:
            self._phases.begin()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._phases.end_pass()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._phases.end_pass()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._steps.stepped(trainer):
            return
        instants = self._phases.end_step()
        if self._speed is None or not is_logged_step(trainer):
            return
        sample = self._measure(trainer, self._speed.row, read_phases(instants))
        if sample is None:
            return
        self._samples = [*self._samples[-NUM_SAMPLES:], sample]
        for bottleneck in find_bottlenecks(self._samples, best=self._best):
            self._report(trainer, bottleneck)
        current = median_sample(self._samples)
        if current is not None and (self._best is None or current.step_seconds < self._best.step_seconds):
            self._best = current

    def _measure(
        self, trainer: Trainer, speed: Mapping[str, float], phases: list[tuple[float, float]]
    ) -> BottleneckSample | None:
        """Return this logged step's sample with the values of all ranks; a collective, so every rank must call it."""
        steps, self._row_step = trainer.global_step - self._row_step, trainer.global_step
        forward = median(seconds for seconds, _ in phases) if phases else 0.0
        wait = speed.get("time/data_wait_fraction", 0.0)
        by_rank = gather_values([forward, wait], trainer.strategy.root_device)
        if "time/step_seconds" not in speed or steps <= 0:
            return None
        step_seconds = speed["time/step_seconds"]
        # under FSDP and ZeRO-3 the forward pass waits for other ranks' shards, so it does not time this rank alone
        is_ddp = isinstance(trainer.strategy, find_classes("strategies.DDPStrategy")) and trainer.world_size > 1
        return BottleneckSample(
            step=trainer.global_step,
            seconds=step_seconds * steps,
            step_seconds=step_seconds,
            data_wait_fraction=tuple(wait for _, wait in by_rank),
            forward_seconds=tuple(seconds for seconds, _ in by_rank) if is_ddp else (),
            sync_seconds=_get_sync_seconds(phases) if is_ddp else None,
            free_memory_fraction=_get_free_memory(trainer.strategy.root_device),
            num_micro_batches=trainer.accumulate_grad_batches,
            mfu=speed.get("throughput/mfu"),
        )

    def _report(self, trainer: Trainer, bottleneck: Bottleneck) -> None:
        if bottleneck.kind in self._reported:
            return
        self._reported.add(bottleneck.kind)
        text = bottleneck.message
        if bottleneck.kind in self._advice:
            text += f"; {self._advice[bottleneck.kind]}".replace("{cores}", str(_num_cores()))
        step = trainer.global_step
        log_event(trainer, f"Step {step}: {text}", "diagnosis", step, kind=bottleneck.kind, text=text)

    @override
    def state_dict(self) -> dict[str, Any]:
        best = None if self._best is None else asdict(self._best)
        return {"where": self._where, "best": best, "reported": sorted(self._reported)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._where, self._reported = state_dict["where"], set(state_dict["reported"])
        best: dict[str, Any] | None = state_dict["best"]
        self._best = None
        if best is not None:
            by_rank = {name: tuple(best[name]) for name in ("data_wait_fraction", "forward_seconds")}
            self._best = BottleneckSample(**(best | by_rank))


def _device_name(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _get_sync_seconds(phases: list[tuple[float, float]]) -> float | None:
    """Return how much longer the window's last backward pass, which reduces gradients, takes than the others."""
    # a single micro-batch, or a pattern other than one forward and one backward pass, as in a GAN
    if len(phases) < 2:
        return None
    *others, last = (backward for _, backward in phases)
    return last - median(others)


def _get_free_memory(device: torch.device) -> float | None:
    """Return the fraction of device memory that was never reserved; None if the device is not CUDA."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return 1.0 - torch.cuda.max_memory_reserved(device) / total


# Time forward and backward passes: with the clock on a CPU, with CUDA events read at logged steps on a GPU.

Instant = float | torch.cuda.Event
_MAX_PASSES = 256  # newest micro-batches kept: with manual optimization a step may never end here


class PhaseTimes:
    """Records timestamps of the passes of the current optimizer step.

    Args:
        device: Device of the model.
        clock: Returns seconds; only used on a CPU.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._is_cuda = device.type == "cuda"
        self._clock = clock
        self._instants: list[list[Instant]] = []

    def begin(self) -> None:
        """Record the start of a micro-batch."""
        self._instants = [*self._instants[-_MAX_PASSES:], [self._now()]]

    def end_pass(self) -> None:
        """Record the end of a pass: the first call of a micro-batch ends the forward, the second the backward pass."""
        if self._instants:
            self._instants[-1].append(self._now())

    def end_step(self) -> list[list[Instant]]:
        """Return each micro-batch's start, forward end and backward end since the last call."""
        instants, self._instants = self._instants, []
        return instants

    def _now(self) -> Instant:
        if not self._is_cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def read_phases(instants: list[list[Instant]]) -> list[tuple[float, float]]:
    """Return (forward, backward) seconds of each micro-batch; on a GPU the passes must have finished."""
    complete = [of_batch for of_batch in instants if len(of_batch) == 3]
    return [(_seconds_between(a, b), _seconds_between(b, c)) for a, b, c in complete]


def _seconds_between(start: Instant, end: Instant) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event), "one device gives one kind of instant"
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(end, float), "one device gives one kind of instant"
    return end - start


def _num_cores() -> int:
    """Return the cores that this process may use, in a container or task fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
