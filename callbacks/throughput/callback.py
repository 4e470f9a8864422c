"""Log training throughput and MFU; costs at most one device synchronization per logged step."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from ..lightning_packages import Callback
from ..logged_step import StepCounter, is_logged_step, log_row
from ..profiler_hooks import Listener, ProfilerTap, get_profiler
from ..protocols import SupportsConsumed
from ..ranks import data_size
from .flop_counter import find_batch_size, get_shapes
from .mfu import FlopMeter
from .stopwatch import CompileListener, Snapshot, Stopwatch, get_rates

log = logging.getLogger("lightning_recipes")


class SpeedMonitor(Callback):
    """Logs `throughput/*` and `time/*` over the window since the last row.

    Useful in every run, to compare settings and hardware and to notice slowdowns.

    Samples and tokens come from `batch_size_fn` and `length_fn`, else from the module if it is a `SupportsConsumed`.
    Otherwise the samples are the first dimension that all tensors of a batch share, and tokens are not logged. FLOPs
    come from the module if it is a `SupportsFlops`; otherwise the matmuls, convolutions, recurrent layers and attention
    of one micro-batch of each shape are counted as it runs. An operator of another library counts with the formula that
    is registered for it with `torch.utils.flop_counter.register_flop_formula`; one line names those without one.

    Excluded from the window and summed in `time/excluded_seconds`: the first step of each process; compilation;
    micro-batches whose FLOPs are being counted; evaluation, from the end of the preceding training batch to the next
    data fetch and thus including worker start-up; every `trainer.save_checkpoint`; and anything that runs inside
    `trainer.profiler.profile(name)` for the names in `EXCLUDED_ACTIONS`. `time/data_wait_fraction` is the fraction of
    the window that this rank spent in the data loader's `next`.

    With `batch_size_fn`, the row after a validation also has `throughput/validation_samples_per_second`, over all of
    its batches, loading included.

    `summary()` returns averages over the whole run, including the parts before a resume.

    Args:
        peak_tflops: Dense peak of one device in the precision of the run, in TFLOP/s. None looks it up in the table
            of published peaks.
        measure_peak: Time a matmul at the start and log the fraction of its rate, instead of the fraction of
            the published peak.
        batch_size_fn: Returns the number of samples in a micro-batch of this rank, assumed equal on all ranks.
        length_fn: Returns the number of tokens per sample of a micro-batch, or its mean; needs `batch_size_fn`.

    Raises:
        ValueError: `peak_tflops` is not above 0, or `length_fn` is set without `batch_size_fn`.

    Example:
        >>> monitor = SpeedMonitor(batch_size_fn=lambda batch: len(batch[0]))
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", logger=False)
        >>> monitor.summary()["steps"]
        0
    """

    summary_fields: ClassVar[dict[str, Any]] = {
        "tokens_per_second": None,
        "samples_per_second": None,
        "mfu": None,
        "excluded_seconds": None,
    }
    EXCLUDED_ACTIONS: ClassVar[tuple[str, ...]] = (
        "save_checkpoint",
        "sample_text",
        "spike",
        "profile",
    )

    def __init__(
        self,
        *,
        peak_tflops: Annotated[float, "> 0"] | None = None,
        measure_peak: bool = False,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], float] | None = None,
    ) -> None:
        super().__init__()
        if peak_tflops is not None and not peak_tflops > 0:
            raise ValueError(
                f"peak_tflops is {peak_tflops}; a peak is above 0; leave it out to take it from the table of devices"
            )
        if length_fn is not None and batch_size_fn is None:
            raise ValueError(
                "length_fn is set and batch_size_fn is not; tokens are samples times length; set batch_size_fn too"
            )
        self._batch_size_fn = batch_size_fn
        self._length_fn = length_fn
        self.clock: Callable[[], float] = time.perf_counter
        self._meter = FlopMeter(peak_tflops=peak_tflops, measure_peak=measure_peak)
        self._earlier = Snapshot()  # totals of earlier processes
        self._earlier_excluded: dict[str, float] = {}
        self._steps = StepCounter()
        self._world_size = 1
        self.row: dict[str, float] = {}  # metrics logged last
        self._begin()

    def _begin(self) -> None:
        self._watch = Stopwatch(self.clock)
        self._now = Snapshot()  # counts of this process; `_read` adds the times
        self._row = Snapshot()  # totals at the last row
        self._is_first = True  # whether this is the first step of this process
        self._is_step_timed = False  # whether any micro-batch of the current step is timed
        self._counted = (0, 0)  # the module's samples and tokens after the last batch
        self._is_size_unclear = False  # whether the tensors of a batch did not tell its size
        self._wait_seconds = 0.0
        self._fetch_began = 0.0
        self._idle_since: float | None = None  # end of the last batch, if known to be finished on the device
        self._busy: torch.cuda.Event | None = None  # recorded at the end of the last batch
        self._taps: list[ProfilerTap | CompileListener] = []
        self._validation_began = 0.0
        self._validation_samples = 0
        self._validation_rate: float | None = None  # of the validation since the last row

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
        """Pause the stopwatch once the device has finished its queue, which still counts as training."""
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
        """Count the fetch as data wait, unless the device was still busy with the previous batch."""
        busy, self._busy = self._busy, None
        if not self._watch.is_paused and (busy is None or busy.query()):
            self._wait_seconds += self.clock() - self._fetch_began

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._meter.needs_watch(trainer, pl_module, batch):
            if not self._is_first:  # the first step is excluded anyway
                self._pause("count_flops")
            self._meter.watch()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._meter.check_loss(loss)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._meter.reach_optimizer(optimizer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._pause("validation")
            self._validation_began, self._validation_samples = self.clock(), 0

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._batch_size_fn is not None:
            self._validation_samples += self._batch_size_fn(batch) * data_size(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._synchronize()
        self._validation_rate = _rate(self._validation_samples, self.clock() - self._validation_began)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = self._steps.stepped(trainer)
        logged = is_logged_step(trainer)
        self._count(trainer, pl_module, batch, stepped=stepped)
        if logged or (stepped and self._is_first):
            self._synchronize()
        if logged or self._is_first or self._device.type == "cpu":
            self._idle_since = self.clock()
        elif self._device.type == "cuda":
            self._busy = torch.cuda.Event()
            self._busy.record()
        if stepped and self._is_first:
            self._is_first = False
            self._watch.resume("first_step")
        if logged:
            reading = self._read()
            window = reading - self._row
            self.row = get_rates(window, world_size=trainer.world_size)
            if "time/step_seconds" in self.row:
                self.row |= self._meter.row(window)
            if self._validation_rate is not None:
                self.row["throughput/validation_samples_per_second"] = self._validation_rate
                self._validation_rate = None
            log_row(pl_module, self.row)
            self._row = reading

    def _count(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *, stepped: bool) -> None:
        """Add this batch's samples, tokens and FLOPs; a counter may have been lowered by a rollback."""
        before, self._counted = self._counted, _counters(pl_module)
        flops = self._get_flops(trainer, pl_module, batch)
        is_timed = not self._watch.is_paused
        if "count_flops" in self._watch.reasons:
            self._synchronize()  # also exclude the work that the counted micro-batch has queued
            self._watch.resume("count_flops")
        if is_timed:  # else excluded: first step, being counted or being traced
            if self._batch_size_fn is not None:
                samples = self._batch_size_fn(batch) * data_size(trainer)
                tokens = 0 if self._length_fn is None else round(samples * self._length_fn(batch))
            elif isinstance(pl_module, SupportsConsumed):
                samples, tokens = (max(0, b - a) for a, b in zip(before, self._counted, strict=True))
            else:
                samples, tokens = self._read_batch_size(trainer, batch), 0
            known, causal = flops or (0.0, None)
            self._now += Snapshot(
                samples=samples,
                tokens=tokens,
                flops=known * data_size(trainer),
                causal_flops=(causal or 0.0) * data_size(trainer),
                uncounted=int(flops is None),
            )
        self._is_step_timed |= is_timed
        if stepped:
            self._meter.end_step()
            self._now += Snapshot(steps=int(self._is_step_timed))
            self._is_step_timed = False

    def _read_batch_size(self, trainer: Trainer, batch: Any) -> int:
        """Return the samples of a micro-batch on all ranks, from its tensors; 0 from the first one on that is unclear.

        Then no row has samples: a rate over a part of its batches would be too low.
        """
        if self._is_size_unclear:
            return 0
        size = find_batch_size(get_shapes(batch))
        if size is not None:
            return size * data_size(trainer)
        self._is_size_unclear = True
        self._now, self._row, self._earlier = (
            replace(counts, samples=0) for counts in (self._now, self._row, self._earlier)
        )
        if trainer.is_global_zero:
            log.warning(
                "no throughput/samples_per_second: the tensors of a batch do not share their first dimension, or there"
                " are none; pass batch_size_fn to SpeedMonitor, such as batch_size_fn=lambda batch: len(batch[0])"
            )
        return 0

    def _get_flops(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> tuple[float, float | None] | None:
        """Return the FLOPs of a micro-batch; exclude the time that the module takes to compute them."""
        if not self._meter.must_ask(pl_module, batch):
            return self._meter.get(trainer, pl_module, batch)
        self._watch.pause("count_flops")
        try:
            return self._meter.get(trainer, pl_module, batch)
        finally:
            self._watch.resume("count_flops")

    def _read(self) -> Snapshot:
        """Return the totals of this process so far."""
        seconds = self._watch.seconds()
        return self._now + Snapshot(
            seconds=seconds,
            device_seconds=seconds * self._world_size,
            wait_seconds=self._wait_seconds,
            excluded_seconds=sum(self._watch.excluded_seconds.values()),
        )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause("end")
        self._detach()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._meter.stop()
        self._detach()  # no synchronization here: the device may be what failed

    def _detach(self) -> None:
        for tap in self._taps:
            tap.detach()
        self._taps = []

    def summary(self) -> dict[str, Any]:
        """Return averages over the run without excluded time; None for values that were not counted."""
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
        self._earlier_excluded = totals.pop("left_out")
        self._earlier = Snapshot(**totals)


def _counters(pl_module: LightningModule) -> tuple[int, int]:
    """Return samples and tokens consumed so far over all ranks; (0, 0) if the module does not count them."""
    return pl_module.recipes_consumed() if isinstance(pl_module, SupportsConsumed) else (0, 0)


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
