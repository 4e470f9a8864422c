"""Benchmark utilities: build a run from overrides, time steps in turns, write a table with the machine's name."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import recipes  # noqa: F401  # before Lightning, which then imports torchvision beside a CPU build of torch

# isort: split
from dataclasses import replace

from recipes.build import Run, build  # isort: skip: before Lightning, whose import may need torchvision mended

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Callback

from recipes.config import compose_and_check
from recipes.runtime.console import open_console
from recipes.runtime.environment import describe_environment

RESULTS = Path(__file__).parent / "results"


class InTurn(Callback):
    """Runs another loop's step before each recipe step and times both, so that drift affects them equally."""

    def __init__(self, other_step: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> None:
        self.other_step = other_step
        self.clock = clock
        self.other: list[float] = []
        self.recipe: list[float] = []
        self._began: float | None = None

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches:
            return
        wait_for_device()
        ended = self.clock()
        if self._began is not None:
            self.recipe.append(ended - self._began)
        began = self.clock()
        self.other_step()
        wait_for_device()
        self._began = self.clock()
        self.other.append(self._began - began)


def wait_for_device() -> None:
    """Wait until the GPU is idle, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def build_run(overrides: Sequence[str]) -> Run:
    """Build a run in a temporary folder, as `train.py` would."""
    folder = Path(tempfile.mkdtemp(prefix="benchmark_"))
    composed, mistakes = compose_and_check(overrides)
    assert composed is not None, [str(mistake) for mistake in mistakes]
    assert not mistakes, [str(mistake) for mistake in mistakes]
    open_console(folder / "train.log")
    run = build(replace(composed, run_folder=folder, overrides=list(overrides)))
    run.data.prepare_data()
    return run


def run_in_turn(
    overrides: Sequence[str],
    other_step: Callable[[], object],
    *,
    skip: int,
    with_callbacks: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """Run a recipe and another loop in turns; return the paired step seconds of both.

    Args:
        overrides: Overrides of the recipe.
        other_step: Executes one step of the other loop.
        skip: Number of initial steps to exclude.
        with_callbacks: Whether the recipe keeps its default callbacks, metric logging and checkpoints.
        clock: Returns seconds, of all threads of this process with `time.process_time`.
    """
    run, in_turn = build_run(overrides), InTurn(other_step, clock)
    if not with_callbacks:
        run.trainer.callbacks.clear()  # type: ignore[attr-defined]
    run.trainer.callbacks.insert(0, in_turn)  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    return in_turn.recipe[skip:], in_turn.other[skip:-1]


def in_turn(num_rounds: int) -> Iterator[int]:
    """Yield round numbers, printed to stderr; each contender runs once per round, so drift affects all equally."""
    for number in range(num_rounds):
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
        yield number


def report(name: str, rows: list[dict[str, Any]], *, command: str | None = None) -> None:
    """Print a table and write it to a file with the machine, versions, command and date.

    Args:
        name: File name in `results/`, without suffix.
        rows: Rows with identical keys, which become the columns.
        command: Command as typed; None uses the script of that name.
    """
    columns = list(rows[0])
    widths = [max(len(column), *(len(str(row[column])) for row in rows)) for column in columns]
    for cells in [
        columns,
        ["-" * width for width in widths],
        *([row[c] for c in columns] for row in rows),
    ]:
        print("  ".join(str(cell).rjust(width) for cell, width in zip(cells, widths, strict=True)))
    RESULTS.mkdir(exist_ok=True)
    environment = describe_environment([])
    machine = {key: environment[key] for key in ("devices", "num_cpus", "num_threads", "python", "packages")}
    typed = command or f"python benchmarks/{name}.py"
    record = {"command": typed, "date": time.strftime("%Y-%m-%d"), "rows": rows} | machine
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
