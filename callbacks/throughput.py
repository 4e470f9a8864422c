"""Speed of training without evaluation and saving: at most one device synchronization per row."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from callbacks.logged_step import StepCounter, is_logged_step, log_row
from callbacks.profiler_tap import Listener, ProfilerTap, profiler_of
from callbacks.stopwatch import Reading, Stopwatch


class SpeedMonitor(Callback):
    """Logs `throughput/*` and `time/*` over the window since the last row.

    Tokens and samples come from the module's `num_tokens` and `num_samples` (int, consumed so far
    over all ranks, up to date when `on_train_batch_end` begins); what a module does not count is
    not logged. Left out of the window: evaluation, from the end of the training batch before it to
    the next fetch of data, so with its worker start-up; every `trainer.save_checkpoint`; and
    whatever runs inside `trainer.profiler.profile("save_checkpoint")` or `profile("sample_text")`.
    `time/data_wait_fraction` is this rank's share of the window spent in the data loader's `next`.

    `summary()` is the average over the whole run, earlier parts of a resumed one included, without
    the first step of each process (compilation, warm-up).
    """

    LEFT_OUT = ("save_checkpoint", "sample_text")

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.perf_counter
        self._earlier = Reading()  # before this process, or before the last load_state_dict
        self._steps = StepCounter()
        self._begin()

    def _begin(self) -> None:
        self._watch = Stopwatch(self.clock)
        self._now = Reading()  # counters of this process; seconds are filled in by _read
        self._row: Reading = Reading()  # at the last row
        self._steady: Reading | None = None  # at the end of this process's first step
        self._counted = (0, 0)  # the module's samples and tokens when last looked at
        self._wait_seconds = 0.0
        self._fetch_began = 0.0
        self._idle_since: float | None = None  # end of the batch, if the device had finished it
        self._tap: ProfilerTap | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin()
        self._device = trainer.strategy.root_device
        self._steps.start(trainer)
        self._counted = _counters(pl_module)
        loop = type(trainer.fit_loop.epoch_loop).__name__
        listeners = {
            f"[{loop}].train_dataloader_next": Listener(self._on_fetch, self._on_fetched),
            **{name: self._pausing(name) for name in self.LEFT_OUT},
        }
        self._tap = ProfilerTap(listeners)
        self._tap.attach(profiler_of(trainer))
        self._watch.start()

    def _pausing(self, name: str) -> Listener:
        return Listener(lambda: self._pause(name), lambda: self._watch.resume(name))

    def _pause(self, reason: str) -> None:
        """Stop the watch where training stopped: work still queued on the device is training."""
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
        self._wait_seconds += self.clock() - self._fetch_began

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._pause("validation")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = self._steps.stepped(trainer)
        logged = stepped and is_logged_step(trainer)
        first = stepped and self._steady is None
        self._count(pl_module, stepped=stepped)
        if logged or first:
            self._synchronize()
        if logged or first or self._device.type == "cpu":
            self._idle_since = self.clock()
        if first:
            self._steady = self._read()
        if logged:
            reading = self._read()
            log_row(pl_module, _rates(reading - self._row, world_size=trainer.world_size))
            self._row = reading

    def _count(self, pl_module: LightningModule, *, stepped: bool) -> None:
        """Add what this batch consumed; a counter that was rolled back counts on from there."""
        before, self._counted = self._counted, _counters(pl_module)
        samples, tokens = (max(0, b - a) for a, b in zip(before, self._counted, strict=True))
        self._now += Reading(steps=int(stepped), samples=samples, tokens=tokens)

    def _read(self) -> Reading:
        """Everything this process has done up to now."""
        seconds = Reading(seconds=self._watch.seconds(), wait_seconds=self._wait_seconds)
        return self._now + seconds

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause("end")
        self._detach()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._detach()  # and no synchronization: the device may be what failed

    def _detach(self) -> None:
        if self._tap is not None:
            self._tap.detach()
            self._tap = None

    def summary(self) -> dict[str, float | int | None]:
        """Averages over the run without first steps; None where nothing was counted."""
        total = self._total()
        return {
            "steps": total.steps,
            "seconds": total.seconds,
            "tokens_per_second": _rate(total.tokens, total.seconds),
            "samples_per_second": _rate(total.samples, total.seconds),
            "step_seconds": total.seconds / total.steps if total.steps else None,
        }

    def _total(self) -> Reading:
        if self._steady is None:
            return self._earlier
        return self._earlier + (self._read() - self._steady)

    def state_dict(self) -> dict[str, float | int]:
        return asdict(self._total())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier = Reading(**state_dict)
        if self._steady is not None:  # a rollback inside this process: nothing compiles again
            self._steady = self._read()


def _counters(pl_module: LightningModule) -> tuple[int, int]:
    """Samples and tokens consumed so far over all ranks; 0 for what the module does not count."""
    samples = getattr(pl_module, "num_samples", None)
    tokens = getattr(pl_module, "num_tokens", None)
    return (
        samples if isinstance(samples, int) else 0,
        tokens if isinstance(tokens, int) else 0,
    )


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


def _rates(window: Reading, *, world_size: int) -> dict[str, float]:
    """The metrics of one row; a window in which no time passed has none."""
    if window.seconds <= 0:
        return {}
    row = {
        "time/step_seconds": window.seconds / window.steps,
        "time/data_wait_fraction": window.wait_seconds / window.seconds,
    }
    if window.samples:
        row["throughput/samples_per_second"] = window.samples / window.seconds
    if window.tokens:
        row["throughput/tokens_per_second"] = window.tokens / window.seconds
        row["throughput/device_tokens_per_second"] = (
            row["throughput/tokens_per_second"] / world_size
        )
    return row
