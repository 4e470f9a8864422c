"""Traces a few steady steps with torch.profiler: nothing before and after them, and they count as no training time."""

import json
import logging
import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import ProfilerActivity, profile

from .logged_step import StepCounter, run_folder
from .profiler_hooks import get_profiler

log = logging.getLogger("lightning_recipes")
FOLDER = "profile"
_NUM_OPERATORS = 20


class StepProfiler(Callback):
    """Leaves `profile/` in the run folder: a trace for chrome://tracing or https://ui.perfetto.dev of each rank, and
    of rank 0 the operators that took most of it, in `operators.json`, with the top ones in the log.

    Args:
        steps: Optimizer steps to trace; None: none.
        after: Optimizer steps of this process before them: compilation and warm-up are over by then.
    """

    def __init__(self, *, steps: int | None = None, after: int = 10) -> None:
        if steps is not None and steps < 1:
            raise ValueError(
                f"profile={steps}: a trace is of 1 or more optimizer steps; type profile=null for none"
            )
        self._num_steps = steps
        self._after = after
        self._steps = StepCounter()
        self._done = 0  # optimizer steps of this process
        self._trace: Any = None  # torch's profiler, while it traces

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)
        self._done = 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._num_steps is None or self._trace is not None or self._done != self._after:
            return
        if isinstance(get_profiler(trainer), PyTorchProfiler):
            self._num_steps = None
            log.warning(
                "nothing is traced: trainer.profiler=pytorch traces already, and torch has one trace"
            )
            return
        activities = [ProfilerActivity.CPU]
        if trainer.strategy.root_device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # torch's tracer writes two lines to stderr whenever it traces (2.13); what goes wrong it raises
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        get_profiler(trainer).start(FOLDER)  # SpeedMonitor hears it
        self._trace = profile(activities=activities, record_shapes=True)
        self._trace.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._steps.stepped(trainer):
            return
        self._done += 1
        if self._num_steps is not None and self._done == self._after + self._num_steps:
            self._end(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._num_steps is not None and self._done <= self._after:
            log.warning(
                f"profile={self._num_steps}: the run ended before step {self._after + 1}, so nothing is traced"
            )
        self._end(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if trainer.strategy.root_device.type == "cuda":
            self._trace = None  # to stop it is to wait for a device that may be what failed
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        """Stop tracing, and write down what there is: a trace is no reason for a run to fail."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        try:
            trace.stop()
            self._write(trainer, trace)
        except Exception as error:
            log.warning(f"the trace could not be written: {type(error).__name__}: {error}")
        finally:
            get_profiler(trainer).stop(FOLDER)

    def _write(self, trainer: Trainer, trace: Any) -> None:
        parent = run_folder(trainer)
        if parent is None:
            log.warning("the trace has no folder to go to: no logger has one")
            return
        folder = parent / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(folder / f"rank_{trainer.global_rank:05d}.trace.json.gz"))
        if not trainer.is_global_zero:
            return
        operators = top_operators(trace)
        (folder / "operators.json").write_text(json.dumps(operators, indent=2) + "\n")
        words = ", ".join(f"{one['name']} {one['share']:.0%}" for one in operators[:3])
        num_steps = self._done - self._after
        steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
        log.info(f"profile: {steps} in {folder}; {words}")


def top_operators(trace: Any) -> list[dict[str, Any]]:
    """Where the time went, most first: of the device's kernels where there are any, else of the host's operators."""
    averages = trace.key_averages()
    on_device = any(one.self_device_time_total > 0 for one in averages)
    taken = [
        (one.self_device_time_total if on_device else one.self_cpu_time_total, one)
        for one in averages
    ]
    total = sum(microseconds for microseconds, _ in taken)
    taken.sort(key=lambda pair: -pair[0])
    return [
        {
            "name": one.key,
            "calls": one.count,
            "self_seconds": microseconds / 1e6,
            "share": microseconds / total,
        }
        for microseconds, one in taken[:_NUM_OPERATORS]
        if microseconds > 0
    ]
