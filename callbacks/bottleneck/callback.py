"""Report what slows a run down; costs a few clock readings per micro-batch and one all-gather per logged step."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from statistics import median
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from ..events import EventKind, log_event
from ..lightning_packages import Callback, find_classes
from ..logged_step import StepCounter, is_logged_step
from ..ranks import gather_values
from ..throughput.callback import SpeedMonitor
from .phase_timer import PhaseTimes, read_phases
from .rules import KINDS, NUM_SAMPLES, Bottleneck, BottleneckSample, find_bottlenecks, median_sample

log = logging.getLogger("lightning_recipes")


class BottleneckMonitor(Callback):
    """Reports when a run waits for data, a slow rank or gradient sync, leaves memory unused, or has slowed down.

    Safe to leave on: it logs nothing while nothing is wrong. Each cause is reported once, as a console line and a
    `diagnosis` event, and only after five logged steps in a row show it. It reads the metrics of a `SpeedMonitor`,
    which must precede it in the list of callbacks; without one it does nothing.

    Args:
        advice: Remedy to append to the report of each kind of bottleneck: `data`, `slow_rank`, `sync`, `small_batch`,
            `slower`. None appends nothing.

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
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
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
            text += f"; {self._advice[bottleneck.kind]}"
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
