"""Measure, as one rank, the most bytes that torch's allocator had given out in the third step of each case.

`python peak_ranks.py <cases.json> <results.json>`; a case is a list of overrides.
"""

import gc
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerActivity, profile, record_function

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

from run_cases import run_all  # noqa: E402
from support import composed_config  # noqa: E402

from recipes.build import build  # noqa: E402

STEP = "measured step"


class MarkStep(Callback):
    """Marks an optimizer step, all its micro-batches included, in the profile."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._mark: Any = None

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step and self._mark is None:
            self._mark = record_function(STEP)
            self._mark.__enter__()

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step + 1 and self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark, self._step = None, -1


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train three steps; return the peak of the third in bytes, of the rank that holds most.

    With several ranks the smallest of three runs: gloo frees what it has sent in threads that the profile does not see,
    now and then, and such bytes seem to stay.
    """
    return {"peak_bytes": min(_run_once(case, folder) for _ in range(1 if world_size() == 1 else 3))}


def world_size() -> int:
    """Return the number of ranks."""
    return int(os.environ["WORLD_SIZE"])


def _run_once(case: dict[str, Any], folder: Path) -> int:
    config = composed_config(*case["overrides"])
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run = build(config, folder, [])
        run.trainer.callbacks.append(MarkStep(2))  # type: ignore[attr-defined]
        run.trainer.fit(run.task, datamodule=run.data)
    trace = folder / f"trace_{run.trainer.global_rank}.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    peak = torch.tensor(peak_bytes(events))
    if dist.is_initialized():
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def peak_bytes(events: Iterable[dict[str, Any]]) -> int:
    """Return the most bytes that were allocated at a time during the marked step, of those the profile saw allocated.

    The profile's own totals are no use: what another thread frees is missing from them. An address that is given out
    again was free.
    """
    events = list(events)
    [step] = [event for event in events if event.get("name") == STEP and event.get("cat") == "user_annotation"]
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


if __name__ == "__main__":
    run_all(run_case)
