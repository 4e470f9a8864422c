"""metrics.csv, one row per logged optimizer step, and events.jsonl, one line per event. One small write a row."""

import csv
import io
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

METRICS_FILE = "metrics.csv"
EVENTS_FILE = "events.jsonl"
# events about a process or the disk, which no resume undoes
OF_PROCESSES = (
    "start",
    "resume",
    "checkpoint_refused",
    "checkpoint_failed",
    "preempted",
    "oom",
    "stop",
    "end",
)


class CsvLogger(Logger):
    """Merges all that is logged for one optimizer step into one row, on disk as soon as it is logged.

    Args:
        run_folder: Where the two files lie.
    """

    def __init__(self, *, run_folder: Path) -> None:
        super().__init__()
        self._folder = Path(run_folder)
        self._columns: list[str] | None = None  # None: the file has not been opened
        self._row: dict[str, float] = {}
        self._row_offset = 0  # bytes of the file before the newest row
        self._last_step = -1.0  # of the newest row in the file

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return self._folder.name

    @property
    def log_dir(self) -> str:
        return str(self._folder)

    @property
    @rank_zero_experiment
    def experiment(self) -> "CsvLogger":
        return self

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add to the row of a step. Lightning counts from 0; the file counts completed steps, so 1 is the first."""
        assert step is not None, "Lightning always names the step"
        row_step = step + 1
        if self._row and self._row["step"] != row_step:
            self._row = {}
        self._row |= {"step": row_step}
        self._row |= {name: value for name, value in metrics.items() if name != "epoch"}
        self._write_row()

    @rank_zero_only
    def resume_at(self, step: int) -> None:
        """Drop the rows after a step: the run goes on from there and will write them again."""
        rows = _read(self._folder / METRICS_FILE)
        kept = [row for row in rows if int(row["step"]) <= step]
        self._columns = list(rows[0]) if rows else ["step"]
        newest = kept.pop() if kept and int(kept[-1]["step"]) == step else None
        self._write(kept)
        if newest is not None:  # a validation at this step may still be to come
            self._row = {name: float(value) for name, value in newest.items() if value}
            self._write_row()
        self._drop_events_after(step)

    @rank_zero_only
    def has_event(self, event: str, step: int) -> bool:
        """Whether an event of a step has been told."""
        path = self._folder / EVENTS_FILE
        events = [json.loads(line) for line in path.read_text().splitlines()]
        return any(one["event"] == event and one["step"] == step for one in events)

    def _drop_events_after(self, step: int) -> None:
        """Those that training will live through again; what happened to processes stays. Mends a torn last line."""
        path = self._folder / EVENTS_FILE
        if not path.is_file():
            return
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        events = [json.loads(line) for line in lines]
        kept = [
            line
            for line, event in zip(lines, events, strict=True)
            if event["step"] <= step or event["event"] in OF_PROCESSES
        ]
        _replace(path, "".join(kept))

    @rank_zero_only
    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """Append one event."""
        line = {"time": round(time.time(), 3), "step": step, "event": event} | fields
        with (self._folder / EVENTS_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _write_row(self) -> None:
        """Append the newest row, or write it again where its step has just been logged to."""
        path = self._folder / METRICS_FILE
        if self._columns is None:
            self._columns = ["step"]
            self._write([])
        fresh = [name for name in self._row if name not in self._columns]
        if fresh:
            self._columns += fresh
            step = str(self._row["step"])
            self._write([row for row in _read(path) if row["step"] != step])
        with path.open("r+", newline="") as file:
            file.seek(0, os.SEEK_END)
            if self._row["step"] != self._last_step:
                self._row_offset = file.tell()
            file.seek(self._row_offset)
            formatted = {name: _format(value) for name, value in self._row.items()}
            csv.DictWriter(file, self._columns).writerow(formatted)
            file.truncate()
        self._last_step = self._row["step"]

    def _write(self, rows: list[dict[str, str]]) -> None:
        """The whole file anew, by one rename."""
        assert self._columns is not None, "the columns are known by now"
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        _replace(self._folder / METRICS_FILE, text.getvalue())
        self._last_step = -1.0


def _replace(path: Path, text: str) -> None:
    """A file anew, by one rename."""
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", newline="") as file:
        file.write(text)
    unfinished.replace(path)


def _format(value: float) -> str:
    """Whole numbers in full; others in 9 digits, which hold every float32 exactly."""
    return str(int(value)) if float(value).is_integer() else f"{value:.9g}"


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    # a killed run may leave half a line at the end
    return list(csv.DictReader(line for line in lines if line.endswith("\n")))
