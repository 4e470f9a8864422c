"""Training speed, excluding everything that is not training: at most one device synchronization per row."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from ..logged_step import StepCounter, is_logged_step, log_row
from ..profiler_hooks import Listener, ProfilerTap, get_profiler
from .mfu import FlopMeter
from .stopwatch import CompileListener, Snapshot, Stopwatch


class SpeedMonitor(Callback):
    """Logs `throughput/*` and `time/*` over the window since the last row.

    Useful always: to compare settings and machines, and to see a run that has become slower.

    Tokens and samples come from the module's `num_tokens` and `num_samples` (int, consumed so far over all ranks, up
    to date when `on_train_batch_end` begins); what a module does not count is not logged. FLOPs come from its
    `flops_of(batch)`, else they are counted, see `FlopMeter`.

    Excluded from the window and summed in `time/excluded_seconds`: the first step of each process; compilation;
    evaluation, from the end of the training batch before it to the next fetch of data, so including its worker
    start-up; every `trainer.save_checkpoint`; and whatever runs inside `trainer.profiler.profile(name)` with one of
    the names in `EXCLUDED_ACTIONS`. `time/data_wait_fraction` is the fraction of the window that this rank spent in
    the data loader's `next`.

    `summary()` returns averages over the whole run, earlier parts of a resumed one included.

    Args:
        peak_tflops: Dense peak of one device in the precision of the run, in TFLOP/s. None takes it from the table
            of published peaks.
        measure_peak: Time a matmul at the start and log the fraction of its rate, instead of the fraction of
            the published peak.

    Raises:
        ValueError: `peak_tflops` is not above 0.

    Example:
        >>> monitor = SpeedMonitor(peak_tflops=989.4)
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", logger=False)
        >>> monitor.summary()["steps"]
        0
    """

    summary_fields: ClassVar[dict[str, Any]] = {
        "tokens_per_second": None,
        "mfu": None,
        "excluded_seconds": None,
    }
    EXCLUDED_ACTIONS: ClassVar[tuple[str, ...]] = (
        "save_checkpoint",
        "sample_text",
        "spike",
        "profile",
    )

    def __init__(self, *, peak_tflops: Annotated[float, "> 0"] | None = None, measure_peak: bool = False) -> None:
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(
                f"callbacks.throughput.peak_tflops is {peak_tflops}; a peak is above 0; type"
                " callbacks.throughput.peak_tflops=null to take it from the table of devices"
            )
        self.clock: Callable[[], float] = time.perf_counter
        self._meter = FlopMeter(peak_tflops=peak_tflops, measure_peak=measure_peak)
        self._earlier = Snapshot()  # before this process
        self._earlier_excluded: dict[str, float] = {}
        self._steps = StepCounter()
        self._world_size = 1
        self.row: dict[str, float] = {}  # logged last
        self._begin()

    def _begin(self) -> None:
        self._watch = Stopwatch(self.clock)
        self._now = Snapshot()  # counts of this process; `_read` adds the seconds
        self._row = Snapshot()  # at the last row
        self._is_first = True  # whether this is the first step of this process
        self._counted = (0, 0)  # the module's samples and tokens after the last batch
        self._wait_seconds = 0.0
        self._fetch_began = 0.0
        self._idle_since: float | None = None  # end of the batch, if the device has finished it
        self._busy: torch.cuda.Event | None = None  # done when the device has finished the batch
        self._taps: list[ProfilerTap | CompileListener] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin()
        self._device = trainer.strategy.root_device
        self._world_size = trainer.world_size
        self._steps.start(trainer)
        self._counted = _counters(pl_module)
        self._meter.start(trainer, pl_module)
        loop = type(trainer.fit_loop.epoch_loop).__name__
        listeners = {
            f"[{loop}].train_dataloader_next": Listener(self._on_fetch, self._on_fetched),
            **{name: self._pausing(name) for name in self.EXCLUDED_ACTIONS},
        }
        self._taps = [ProfilerTap(listeners, get_profiler(trainer)), CompileListener(self._watch)]
        self._watch.start()
        self._watch.pause("first_step")

    def _pausing(self, name: str) -> Listener:
        return Listener(lambda: self._pause(name), lambda: self._watch.resume(name))

    def _pause(self, reason: str) -> None:
        """Pause the stopwatch at the end of training: work still queued on the device is training."""
        if self._idle_since is None:
            self._synchronize()
        self._watch.pause(reason, at=self._idle_since)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _on_fetch(self) -> None:
        self._idle_since = None
        self._watch.resume("validation")
        self._fetch_began = self.clock()

    def _on_fetched(self) -> None:
        """Count the fetch as waiting, unless the device was still busy with the previous batch."""
        busy, self._busy = self._busy, None
        if not self._watch.is_paused and (busy is None or busy.query()):  # type: ignore[no-untyped-call]
            self._wait_seconds += self.clock() - self._fetch_began

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._pause("validation")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = self._steps.stepped(trainer)
        logged = stepped and is_logged_step(trainer)
        self._count(trainer, pl_module, batch, stepped=stepped)
        if logged or (stepped and self._is_first):
            self._synchronize()
        if logged or self._is_first or self._device.type == "cpu":
            self._idle_since = self.clock()
        elif self._device.type == "cuda":
            self._busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._busy.record()
        if stepped and self._is_first:
            self._is_first = False
            self._watch.resume("first_step")
        if logged:
            reading = self._read()
            self.row = self._rates(reading - self._row, world_size=trainer.world_size)
            log_row(pl_module, self.row)
            self._row = reading

    def _count(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *, stepped: bool) -> None:
        """Add what this batch consumed; a counter that was rolled back continues from its lower value."""
        before, self._counted = self._counted, _counters(pl_module)
        flops, causal_flops = self._get_flops(trainer, pl_module, batch)
        if self._watch.is_paused:  # the whole step is excluded: the first one, a traced one
            return
        samples, tokens = (max(0, b - a) for a, b in zip(before, self._counted, strict=True))
        self._now += Snapshot(
            steps=int(stepped),
            samples=samples,
            tokens=tokens,
            flops=flops * trainer.world_size,
            causal_flops=(causal_flops or 0.0) * trainer.world_size,
        )

    def _get_flops(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> tuple[float, float | None]:
        """Return remembered FLOPs, else compute them, which is excluded from the training time."""
        if (known := self._meter.known(batch)) is not None:
            return known
        self._watch.pause("count_flops")
        try:
            return self._meter.compute(trainer, pl_module, batch)
        finally:
            self._watch.resume("count_flops")

    def _read(self) -> Snapshot:
        """Return everything this process has done so far."""
        seconds = self._watch.seconds()
        return self._now + Snapshot(
            seconds=seconds,
            device_seconds=seconds * self._world_size,
            wait_seconds=self._wait_seconds,
            excluded_seconds=sum(self._watch.excluded_seconds.values()),
        )

    def _rates(self, window: Snapshot, *, world_size: int) -> dict[str, float]:
        """Return the metrics of one row; of a window without training, its excluded seconds only."""
        row = {"time/excluded_seconds": window.excluded_seconds}
        if window.seconds <= 0 or not window.steps:
            return row
        row["time/step_seconds"] = window.seconds / window.steps
        row["time/data_wait_fraction"] = window.wait_seconds / window.seconds
        if window.samples:
            row["throughput/samples_per_second"] = window.samples / window.seconds
        if window.tokens:
            tokens_per_second = window.tokens / window.seconds
            row["throughput/tokens_per_second"] = tokens_per_second
            row["throughput/device_tokens_per_second"] = tokens_per_second / world_size
        return row | self._meter.row(window)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause("end")
        self._detach()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach()  # no synchronization here: the device may be what failed

    def _detach(self) -> None:
        for tap in self._taps:
            tap.detach()
        self._taps = []

    def summary(self) -> dict[str, Any]:
        """Return averages over the run, excluded time not counted; None where nothing was counted."""
        total = self._total()
        mfu = None
        if total.seconds > 0:
            mfu = self._meter.row(total).get("throughput/mfu")
        return {
            "steps": total.steps,
            "seconds": total.seconds,
            "tokens_per_second": _rate(total.tokens, total.seconds),
            "samples_per_second": _rate(total.samples, total.seconds),
            "step_seconds": total.seconds / total.steps if total.steps else None,
            "mfu": mfu,
            "excluded_seconds": self._excluded_seconds(),
        }

    def _total(self) -> Snapshot:
        return self._earlier + self._read()

    def _excluded_seconds(self) -> dict[str, float]:
        """Return the excluded seconds of the whole run, by reason."""
        now = self._watch.excluded_seconds
        before = self._earlier_excluded
        return {reason: before.get(reason, 0.0) + now.get(reason, 0.0) for reason in sorted({*before, *now})}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self._total()), "left_out": self._excluded_seconds()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        totals = dict(state_dict)
        if "left_out" in totals:  # not in the checkpoints of earlier versions
            self._earlier_excluded = totals.pop("left_out")
        self._earlier = Snapshot(**totals)


def _counters(pl_module: LightningModule) -> tuple[int, int]:
    """Return samples and tokens consumed so far over all ranks; 0 for what the module does not count."""
    samples = getattr(pl_module, "num_samples", None)
    tokens = getattr(pl_module, "num_tokens", None)
    return (
        samples if isinstance(samples, int) else 0,
        tokens if isinstance(tokens, int) else 0,
    )


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
