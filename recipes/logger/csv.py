"""metrics.csv, one row per logged optimizer step, and events.jsonl, one line per event. One small write a row."""

import csv
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

METRICS_FILE = "metrics.csv"
EVENTS_FILE = "events.jsonl"


class CsvLogger(Logger):
    """Merges all that is logged for one optimizer step into one row.

    A row is written when a later step is logged, or at the end: a validation belongs to the row of its step.
    A resumed run continues the file; rows from the step on where it resumed are replaced.

    Args:
        run_folder: Where the two files lie.
    """

    def __init__(self, *, run_folder: Path) -> None:
        super().__init__()
        self._folder = Path(run_folder)
        self._columns: list[str] = ["step"]
        self._row: dict[str, float] = {}
        self._opened = False

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
            self._write_row()
        self._row["step"] = row_step
        self._row |= {name: value for name, value in metrics.items() if name != "epoch"}

    @rank_zero_only
    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """Append one event."""
        line = {"time": round(time.time(), 3), "step": step, "event": event} | fields
        with (self._folder / EVENTS_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the row that is still open."""
        if self._row:
            self._write_row()

    def _write_row(self) -> None:
        row, self._row = self._row, {}
        path = self._folder / METRICS_FILE
        if not self._opened:
            self._opened = True
            self._continue(path, before_step=int(row["step"]))
        fresh = [name for name in row if name not in self._columns]
        if fresh:
            self._widen(path, fresh)
        with path.open("a", newline="") as file:
            formatted = {name: _format(value) for name, value in row.items()}
            csv.DictWriter(file, self._columns).writerow(formatted)

    def _continue(self, path: Path, *, before_step: int) -> None:
        """Start the file, or cut one that is there back to the rows before a step."""
        rows = _read(path)
        if rows:
            self._columns = list(rows[0])
        kept = [row for row in rows if int(row["step"]) < before_step]
        _write(path, self._columns, kept)

    def _widen(self, path: Path, fresh: list[str]) -> None:
        """Give the file new columns at the right."""
        self._columns += fresh
        _write(path, self._columns, _read(path))


def _format(value: float) -> str:
    """Whole numbers in full; others in 9 digits, which hold every float32 exactly."""
    return str(int(value)) if float(value).is_integer() else f"{value:.9g}"


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    # a killed run may leave half a line at the end
    return list(csv.DictReader(line for line in lines if line.endswith("\n")))


def _write(path: Path, columns: list[str], rows: list[dict[str, str]]) -> None:
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)
