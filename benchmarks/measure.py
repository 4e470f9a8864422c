"""What the benchmarks share: a run built from overrides, timed steps, a table with where it was measured."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Callback

from recipes.build import Run, build
from recipes.console import open_console
from recipes.environment import describe_environment
from recipes.launch import compose_and_check

RESULTS = Path(__file__).parent / "results"


class StepClock(Callback):
    """The time at which each optimizer step begins, after waiting for the device."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            wait_for_device()
            self.times.append(time.perf_counter())

    def seconds(self, skip: int) -> list[float]:
        """Durations of the steps, less the first `skip`."""
        return [b - a for a, b in zip(self.times[skip:-1], self.times[skip + 1 :], strict=True)]


def wait_for_device() -> None:
    """Let the GPU, if there is one, finish what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def build_run(overrides: Sequence[str]) -> Run:
    """A run in a temporary folder, as `train.py` would build it."""
    folder = Path(tempfile.mkdtemp(prefix="benchmark_"))
    composed, mistakes = compose_and_check(overrides)
    assert composed is not None, [str(mistake) for mistake in mistakes]
    assert not mistakes, [str(mistake) for mistake in mistakes]
    open_console(folder / "train.log")
    run = build(composed.config, folder, list(overrides))
    run.data.prepare_data()
    return run


def recipe_step_seconds(overrides: Sequence[str], *, skip: int) -> list[float]:
    """Step durations of a whole run with every default callback, as a person gets it."""
    run, clock = build_run(overrides), StepClock()
    run.trainer.callbacks.insert(0, clock)  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    return clock.seconds(skip)


def in_turn(num_rounds: int) -> Iterator[int]:
    """Rounds, told on stderr: each contender runs once a round, so that drift hits all of them."""
    for number in range(num_rounds):
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
        yield number


def report(name: str, rows: list[dict[str, Any]]) -> None:
    """Print a table and keep it with the machine, the versions and the command."""
    columns = list(rows[0])
    widths = [max(len(column), *(len(str(row[column])) for row in rows)) for column in columns]
    for cells in [
        columns,
        ["-" * width for width in widths],
        *([row[c] for c in columns] for row in rows),
    ]:
        print("  ".join(str(cell).rjust(width) for cell, width in zip(cells, widths, strict=True)))
    RESULTS.mkdir(exist_ok=True)
    where = describe_environment([])
    kept = {key: where[key] for key in ("devices", "num_cpus", "num_threads", "python", "packages")}
    record = {"command": f"python benchmarks/{name}.py", "rows": rows} | kept
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
