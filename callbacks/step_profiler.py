"""Trace a few steady-state steps with torch.profiler; no cost outside them, and excluded from throughput."""

import json
import logging
import os
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

from .files import filling, write_atomically
from .lightning_packages import Callback, find_classes
from .logged_step import StepCounter, output_folder
from .profiler_hooks import get_profiler

log = logging.getLogger("lightning_recipes")
FOLDER = "profile"
_NUM_OPERATORS = 20


class StepProfiler(Callback):
    """Writes a trace of a few optimizer steps to `profile/` in the run folder, else in `trainer.default_root_dir`.

    Useful for finding the operators that dominate a step, and the gaps in which the device waits for the host.

    Each rank writes a trace for https://ui.perfetto.dev or chrome://tracing; rank 0 also writes the most expensive
    operators to `operators.json` and logs the top three.

    Args:
        steps: Optimizer steps to trace. None disables tracing.
        after: Optimizer steps of this process before the first traced one, so that compilation and warm-up are over.

    Raises:
        ValueError: `steps` is below 1, or `after` is below 0.

    Example:
        >>> profiler = StepProfiler(steps=3, after=10)
        >>> trainer = Trainer(callbacks=[profiler], accelerator="cpu", logger=False)
        >>> profiler in trainer.callbacks
        True
    """

    only_shows: ClassVar[bool] = True  # neither what is trained nor what is measured depends on it

    def __init__(self, *, steps: Annotated[int, ">= 1"] | None = None, after: Annotated[int, ">= 0"] = 10) -> None:
        super().__init__()
        if steps is not None and steps < 1:
            raise ValueError(f"steps is {steps}; a trace needs 1 or more optimizer steps; set None to trace none")
        if after < 0:
            raise ValueError(f"after is {after}; a trace begins after 0 or more optimizer steps; set after=10")
        self._num_steps = steps
        self._after = after
        self._steps = StepCounter()
        self._done = 0  # optimizer steps of this process
        self._trace: Any = None  # torch's profiler, while it runs

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)
        self._done = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._num_steps is None or self._trace is not None or self._done != self._after:
            return
        # Lightning's profiler may not have begun: it waits for a step of its own schedule
        if torch._C._autograd._profiler_enabled() or isinstance(
            get_profiler(trainer), find_classes("profilers.PyTorchProfiler")
        ):
            self._num_steps = None
            log.warning("nothing is traced: another torch profiler traces already, and torch supports one at a time")
            return
        activities = [ProfilerActivity.CPU]
        if trainer.strategy.root_device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Kineto prints two lines to stderr per trace (torch 2.13); real errors are raised as exceptions
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        get_profiler(trainer).start(FOLDER)  # SpeedMonitor listens and excludes this time from throughput
        self._trace = profile(activities=activities, record_shapes=True)
        self._trace.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._steps.stepped(trainer):
            return
        self._done += 1
        if self._num_steps is not None and self._done == self._after + self._num_steps:
            self._end(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._num_steps is not None and self._done <= self._after:
            log.warning(f"the run ended before step {self._after + 1} of this process, so nothing is traced")
        self._end(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.strategy.root_device.type == "cuda":
            # stopping the trace waits for the device, which may be what failed
            self._trace = None
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        """Stop tracing and write the trace; an error here must not end the run."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        try:
            trace.stop()
            self._write(trainer, trace)
        except Exception as error:
            log.warning(f"the trace could not be written: {type(error).__name__}: {error}. The run goes on")
        finally:
            get_profiler(trainer).stop(FOLDER)

    def _write(self, trainer: Trainer, trace: Any) -> None:
        folder = output_folder(trainer) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{trainer.global_rank:05d}"
        with filling(folder, writer=name) as unfinished:
            trace.export_chrome_trace(str(unfinished / f"{name}.trace.json.gz"))
        if not trainer.is_global_zero:
            return
        operators = top_operators(trace)
        write_atomically(folder / "operators.json", json.dumps(operators, indent=2) + "\n")
        top = ", ".join(f"{operator['name']} {operator['share']:.0%}" for operator in operators[:3])
        num_steps = self._done - self._after
        steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
        log.info(f"profile: {steps} in {folder}; {top}")


def top_operators(trace: Any) -> list[dict[str, Any]]:
    """Return the operators with the longest self time, longest first.

    Args:
        trace: A stopped `torch.profiler.profile`.

    Returns:
        `name`, `calls`, `self_seconds` and `share` (fraction of total self time) of the device kernels if there are
        any, else of the host operators.
    """
    averages = trace.key_averages()
    on_device = any(average.self_device_time_total > 0 for average in averages)
    timed = [
        (average.self_device_time_total if on_device else average.self_cpu_time_total, average) for average in averages
    ]
    total = sum(microseconds for microseconds, _ in timed)
    timed.sort(key=lambda pair: -pair[0])
    return [
        {
            "name": average.key,
            "calls": average.count,
            "self_seconds": microseconds / 1e6,
            "share": microseconds / total,
        }
        for microseconds, average in timed[:_NUM_OPERATORS]
        if microseconds > 0
    ]
