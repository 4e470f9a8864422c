"""Real runs stopped by real signals: a callback that sends the signals, and readers for the output of stopped runs."""

import csv
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback

from recipes.checkpoint.manifest import find_content_fault, find_fault, read_manifest

# prefixes of columns and fields that differ between runs
MEASURED = ("time/", "throughput/", "memory/")
MEASURED_AT_THE_END = ("seconds", "tokens_per_second", "samples_per_second", "peak_memory_gib", "excluded_seconds")


class SignalAt(Callback):
    """Sends each of its signals once, even if the run resumes; from then on every batch takes 0.3 s.

    Args:
        folder: Run folder; one file per signal records that it has been sent.
        signals: `<moment>_<step>_<signal>_<to>`: after this many steps, at the moment `start` (before training),
            `window` (the first micro-batch of two), `batch` (the second), `step` (its end) or `validation` (its third
            batch), to a rank, to the `parent`, to `all` of these, or to this process `again` and again.
        pause: Seconds that every batch takes before the first signal.
        no_data_after: Micro-batches after which the last rank waits for a sample, once a file says so.
        no_data_seconds: How long it waits.
    """

    def __init__(
        self,
        *,
        folder: str,
        signals: Sequence[str],
        pause: float = 0.0,
        no_data_after: int | None = None,
        no_data_seconds: float = 600.0,
    ) -> None:
        self._no_data_seconds = no_data_seconds
        self._no_data_after = no_data_after
        self._folder = Path(folder)
        self._signals = [text.split("_") for text in signals]
        self._pause = pause

    def on_fit_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        for callback in trainer.checkpoint_callbacks:
            callback.wait_seconds = 2.0  # type: ignore[attr-defined]
        self._send(trainer, "start")

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._send(trainer, "batch" if batch_idx % 2 else "window")
        time.sleep(self._pause)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._send(trainer, "step")
        if batch_idx + 1 == self._no_data_after and trainer.global_rank == trainer.world_size - 1:
            data = type(trainer.datamodule.source.train())  # type: ignore[attr-defined]
            fetch, seconds = data.__getitems__, self._no_data_seconds

            def wait_and_fetch(*indices: Any) -> Any:
                (self._folder / "waits").touch()
                _work(seconds)
                data.__getitems__ = fetch
                return fetch(*indices)

            data.__getitem__ = data.__getitems__ = wait_and_fetch

    def on_validation_batch_start(
        self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if batch_idx == 2:
            self._send(trainer, "validation")
        time.sleep(self._pause)

    def on_exception(self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException) -> None:
        with (self._folder / f"ended_{trainer.global_rank}").open("a") as file:
            file.write(f"{type(exception).__name__} {trainer.global_step}\n")

    def _send(self, trainer: lightning.Trainer, now: str) -> None:
        rank = trainer.global_rank
        for moment, step, name, to in self._signals:
            mark = self._folder / f"{moment}_{step}_{rank}"
            if moment != now or trainer.global_step != int(step) or mark.exists():
                continue
            mark.touch()
            number = signal.Signals[name]
            if to in ("parent", "all") and rank == 0:
                os.kill(os.getppid(), number)
            if to in ("all", "again", str(rank)):
                os.kill(os.getpid(), number)
            self._pause = 0.3
            if moment == "window":  # enough time for the ranks to agree within this step
                _work(2.0)
            if to == "again":  # immediately: the same request; more than a second later: a second one
                os.kill(os.getpid(), number)
                _work(1.2)
                os.kill(os.getpid(), signal.SIGUSR1)
                _work(60.0)


def _work(seconds: float) -> None:
    """Sleep in short intervals: signals are handled between them, as between two operations of a program."""
    for _ in range(int(seconds * 50)):
        time.sleep(0.02)


def computed(folder: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv as text, without time and memory measurements."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            {name: text for name, text in row.items() if not name.startswith(MEASURED)} for row in csv.DictReader(file)
        ]


def summed_up(folder: Path) -> dict[str, Any]:
    """Return the run summary, without time and memory measurements."""
    summary = json.loads((folder / "summary.json").read_text())
    return {name: value for name, value in summary.items() if name not in MEASURED_AT_THE_END}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind, oldest first."""
    all_events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in all_events if event["event"] == kind]


def stopped_step(folder: Path, *, by: str, num_ranks: int = 1) -> int:
    """Return the step at which a signal stopped a run; check that all ranks stopped there, with a valid checkpoint."""
    preempted = events(folder, "preempted")[-1]
    step: int = preempted["step"]
    assert (preempted["signal"], preempted["saved"]) == (by, True)
    assert summed_up(folder)["status"] == "preempted"
    assert summed_up(folder)["steps"] == step
    for rank in range(num_ranks):
        ended = (folder / f"ended_{rank}").read_text().splitlines()
        assert ended[-1] == f"Preempted {step}", (rank, ended)
    last = (folder / "checkpoints" / "last").resolve()
    assert last.name == f"step_{step:07d}.ckpt"
    assert find_fault(last) is None
    manifest = read_manifest(last)
    assert manifest is not None
    assert (manifest.step, manifest.world_size) == (step, num_ranks)
    assert find_content_fault(last, manifest, list(manifest.files)) is None
    assert int(computed(folder)[-1]["step"]) == step
    return step


def seconds_to_stop(folder: Path, mark: str) -> float:
    """Return the seconds from a signal until the run logged that it had stopped."""
    stopped: float = events(folder, "preempted")[-1]["time"]
    return stopped - (folder / mark).stat().st_mtime
