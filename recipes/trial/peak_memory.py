"""Measure a rank's peak memory in one optimizer step, from the GPU's allocator or torch's profiler on a CPU."""

import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerActivity, profile, record_function
from typing_extensions import override

_MARK = "measured step"


class PeakMemory(Callback):
    """Measures one optimizer step with all its micro-batches. Enter it before the run is built.

    On a GPU this is the allocator's reserved memory, including fragmentation. On a CPU torch's profiler records every
    tensor from the start, which costs time and a file that grows with the run.

    Args:
        step: Number of the step, from 0; the first creates the optimizer's state.

    Attributes:
        peak_bytes: Peak of this rank; available when the context ends.
        seconds: Duration of the step.
    """

    def __init__(self, step: int) -> None:
        self.peak_bytes = 0
        self.seconds = 0.0
        self._step = step
        self._mark: Any = None
        self._began = 0.0
        self._profiler: Any = None

    def __enter__(self) -> "PeakMemory":
        if not torch.cuda.is_available():
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints two lines
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profiler.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._profiler is None:
            self.peak_bytes = torch.cuda.max_memory_reserved()
            return
        self._profiler.__exit__(*error)
        if error[0] is None:
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(trace))
                self.peak_bytes = peak_bytes(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])

    @override
    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step and self._mark is None:
            _wait()
            self._began = time.perf_counter()
            self._mark = record_function(_MARK)
            self._mark.__enter__()

    @override
    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step + 1 and self._mark is not None:
            _wait()
            self.seconds = time.perf_counter() - self._began
            self._mark.__exit__(None, None, None)
            self._mark, self._step = None, -1


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(events: Iterable[Mapping[str, Any]]) -> int:
    """Return the most bytes that were allocated at a time during the marked step, of those the profile saw allocated.

    The profile's own totals are no use: what another thread frees is missing from them. An address that is given out
    again was free.

    Args:
        events: Of a chrome trace.
    """
    events = list(events)
    [step] = [event for event in events if event.get("name") == _MARK and event.get("cat") == "user_annotation"]
    live: dict[int, int] = {}
    total = most = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        total -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            total += size
        if step["ts"] <= event["ts"] <= step["ts"] + step["dur"]:
            most = max(most, total)
    return most
