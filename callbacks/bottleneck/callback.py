"""One line about what slows a run down, once it is clear: a few clock readings a micro-batch, one gather a row."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from ..logged_step import StepCounter, is_logged_step
from ..throughput.callback import SpeedMonitor
from .phase_timer import PhaseTimes
from .rules import NUM_ROWS, BottleneckSample, Finding, findings, typical

log = logging.getLogger("lightning_recipes")


class BottleneckMonitor(Callback):
    """Says that a run waits for data, for one rank or for gradients, has room for larger micro-batches, or has
    become slower than it was: each once, as a line and an event `diagnosis`, and only when five rows in a row agree.

    Stands behind `SpeedMonitor`, whose rows it reads; does nothing without one.

    Args:
        advice: What to type, by kind of finding: `data`, `slow_rank`, `sync`, `small_batch`, `slower`.
    """

    def __init__(self, *, advice: Mapping[str, str] | None = None) -> None:
        self._advice = dict(advice) if advice is not None else {}
        self.clock: Callable[[], float] = time.perf_counter
        self._steps = StepCounter()
        self._rows: list[BottleneckSample] = []
        self._best: BottleneckSample | None = None
        self._told: set[str] = set()
        self._where = ""
        self._row_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)
        self._speed = self._speed_monitor(trainer)
        self._phases = PhaseTimes(trainer.strategy.root_device, self.clock)
        self._rows, self._row_step = [], trainer.global_step
        where = f"{_device_name(trainer)} x {trainer.world_size}"
        if where != self._where:  # another machine has another best
            self._where, self._best = where, None

    def _speed_monitor(self, trainer: Trainer) -> SpeedMonitor | None:
        """The one that stands before this one: it has read its clock, and waited for the device, by then."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SpeedMonitor):
                return callback
            if callback is self and trainer.is_global_zero:
                log.warning("BottleneckMonitor says nothing: it has no SpeedMonitor before it")
                return None
        return None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._speed is not None:
            self._phases.begin()

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        self._phases.end_forward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._phases.end_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._steps.stepped(trainer):
            return
        phases = self._phases.end_step()
        if self._speed is None or not is_logged_step(trainer):
            return
        row = self._read(trainer, self._speed.row, phases.read())
        if row is None:
            return
        self._rows = [*self._rows[-NUM_ROWS:], row]
        for finding in findings(self._rows, best=self._best):
            self._tell(trainer, finding)
        now = typical(self._rows)
        if now is not None and (self._best is None or now.step_seconds < self._best.step_seconds):
            self._best = now

    def _read(
        self, trainer: Trainer, speed: Mapping[str, float], phases: list[tuple[float, float]]
    ) -> BottleneckSample | None:
        """The newest row, of all ranks: every rank comes here for every row."""
        steps, self._row_step = trainer.global_step - self._row_step, trainer.global_step
        forward = median(seconds for seconds, _ in phases) if phases else 0.0
        wait = speed["time/data_wait_fraction"] if "time/data_wait_fraction" in speed else 0.0
        of_ranks = _gather([forward, wait], trainer)
        if "time/step_seconds" not in speed or steps <= 0:
            return None
        step_seconds = speed["time/step_seconds"]
        # under FSDP and ZeRO-3 a forward pass waits for the shards of others: it tells nothing of its own rank
        is_ddp = isinstance(trainer.strategy, DDPStrategy) and trainer.world_size > 1
        return BottleneckSample(
            step=trainer.global_step,
            seconds=step_seconds * steps,
            step_seconds=step_seconds,
            data_wait=tuple(wait for _, wait in of_ranks),
            forward_seconds=tuple(seconds for seconds, _ in of_ranks) if is_ddp else (),
            sync_seconds=_sync_seconds(phases) if is_ddp else None,
            free_memory=_free_memory(trainer.strategy.root_device),
            num_micro_batches=trainer.accumulate_grad_batches,
            mfu=speed["throughput/mfu"] if "throughput/mfu" in speed else None,
        )

    def _tell(self, trainer: Trainer, finding: Finding) -> None:
        if finding.kind in self._told:
            return
        self._told.add(finding.kind)
        if not trainer.is_global_zero:
            return
        text = finding.text
        if finding.kind in self._advice:
            text += f"; {self._advice[finding.kind]}"
        log.warning(f"Step {trainer.global_step}: {text}")
        for logger in trainer.loggers:
            if hasattr(logger, "log_event"):
                logger.log_event("diagnosis", trainer.global_step, kind=finding.kind, text=text)

    def state_dict(self) -> dict[str, Any]:
        best = None if self._best is None else asdict(self._best)
        return {"where": self._where, "best": best, "told": sorted(self._told)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._where, self._told = state_dict["where"], set(state_dict["told"])
        best: dict[str, Any] | None = state_dict["best"]
        self._best = None
        if best is not None:
            by_rank = {name: tuple(best[name]) for name in ("data_wait", "forward_seconds")}
            self._best = BottleneckSample(**(best | by_rank))


def _device_name(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _sync_seconds(phases: list[tuple[float, float]]) -> float | None:
    """By which the last backward pass of a window, the one that reduces, is longer than the others."""
    if (
        len(phases) < 2
    ):  # one pass; or passes of another pattern than forward and backward, as of a GAN
        return None
    *others, last = (backward for _, backward in phases)
    return last - median(others)


def _free_memory(device: torch.device) -> float | None:
    """Share that was never taken."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return 1.0 - torch.cuda.max_memory_reserved(device) / total


def _gather(mine: list[float], trainer: Trainer) -> list[list[float]]:
    """The same numbers of every rank, by rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    packed = torch.tensor(mine, device=trainer.strategy.root_device)  # [number of values]
    everyone = packed.new_empty(dist.get_world_size() * len(mine))
    dist.all_gather_into_tensor(everyone, packed)
    rows: list[list[float]] = everyone.view(-1, len(mine)).tolist()  # one wait for the device
    return rows
