"""metrics.csv, one row per logged optimizer step, and events.jsonl, one line per event. One small write a row."""

import contextlib
import csv
import io
import json
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from recipes.run_folder import (
    EVENTS_FILE,
    METRICS_FILE,
    ROLLED_BACK_FOLDER,
    read_cells,
    write_atomically,
)

LOGGER = logging.getLogger("lightning_recipes")
# events of the run itself about a process or the disk, which no resume undoes; a callback declares its own with
# `kept_on_resume`, see `callbacks.events.EventKind` ("stop" has no such field in the files of earlier versions)
OF_PROCESSES = (
    "start",
    "resume",
    "checkpoint_rejected",
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
        self._columns: list[str] = []  # none: the file has not been opened
        self._rows: list[dict[str, float]] = []  # the newest, after those that are not on the disk
        self._offset: int | None = None  # bytes of the file before them; None: all it has
        self._is_written = True
        self._events: list[str] = []  # lines that are not on the disk
        self._events_offset: int | None = None
        self._has_told = False

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
        if self._rows and self._rows[-1]["step"] != step + 1:
            if self._is_written:
                self._rows, self._offset = [], None
            self._rows.append({"step": step + 1})
        elif not self._rows:
            self._rows.append({"step": step + 1})
        self._rows[-1] |= {name: value for name, value in metrics.items() if name != "epoch"}
        self._write_rows()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """A last try for the rows that the disk has not taken."""
        if not self._is_written:
            self._write_rows()

    @rank_zero_only
    def resume_at(self, step: int, *, num_rollbacks: int = 0) -> None:
        """Drop the rows and events after a step: the run goes on from there and will write them again.

        Args:
            step: Optimizer steps completed.
            num_rollbacks: That the run has behind it there: what came before them is past, whatever its step.
        """
        self._drop_rows_after(step)
        self._drop_events_after(step, num_rollbacks)

    def _drop_rows_after(self, step: int) -> None:
        self._rows = []
        rows = read_cells(self._folder / METRICS_FILE)
        kept = [row for row in rows if int(row["step"]) <= step]
        newest = kept.pop() if kept and int(kept[-1]["step"]) == step else None
        if newest is not None:  # a validation at this step may still be to come
            numbers = {name: float(value) for name, value in newest.items() if value}
            self._rows = [numbers | {"step": step}]
        self._replace_rows(kept, list(rows[0]) if rows else ["step"])

    @rank_zero_only
    def on_rollback(self, trainer: Any, pl_module: Any, from_step: int, to_step: int) -> None:
        """The rows after the step gone back to leave metrics.csv, which has one row a step, for a file of their own."""
        with self._or_later():
            undone = [
                row for row in read_cells(self._folder / METRICS_FILE) if int(row["step"]) > to_step
            ]
            if undone:
                text = io.StringIO(newline="")
                writer = csv.DictWriter(text, list(undone[0]))
                writer.writeheader()
                writer.writerows(undone)
                folder = self._folder / ROLLED_BACK_FOLDER
                folder.mkdir(exist_ok=True)
                write_atomically(
                    folder / f"steps_{to_step + 1:07d}_to_{from_step:07d}.csv", text.getvalue()
                )
        self._drop_rows_after(to_step)

    @rank_zero_only
    def has_event(self, event: str, step: int) -> bool:
        """Whether an event of a step has been told."""
        path = self._folder / EVENTS_FILE
        events = [json.loads(line) for line in path.read_text().splitlines()]
        return any(one["event"] == event and one["step"] == step for one in events)

    def _drop_events_after(self, step: int, num_rollbacks: int) -> None:
        """Those that training will live through again; what happened to processes stays. Mends a torn last line."""
        path = self._folder / EVENTS_FILE
        if not path.is_file():
            return
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        events = [json.loads(line) for line in lines]
        rollbacks = [n for n, event in enumerate(events) if event["event"] == "rollback"]
        past = [-1, *rollbacks][min(num_rollbacks, len(rollbacks))]
        kept = [
            line
            for number, (line, event) in enumerate(zip(lines, events, strict=True))
            if number <= past
            or event["step"] <= step
            or event["event"] in OF_PROCESSES
            or event.get("kept_on_resume", False)
        ]
        write_atomically(path, "".join(kept))
        self._events_offset = None

    @rank_zero_only
    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """Append one event."""
        line = {"time": round(time.time(), 3), "step": step, "event": event} | fields
        self._events.append(json.dumps(line) + "\n")
        with self._or_later():
            path = self._folder / EVENTS_FILE
            path.touch()
            if self._events_offset is None:
                self._events_offset = path.stat().st_size
            self._events_offset = _put(path, "".join(self._events), self._events_offset)
            self._events = []

    def _write_rows(self) -> None:
        """The newest row, in place of itself where it is on the disk already, after those that are not."""
        path = self._folder / METRICS_FILE
        self._is_written = False
        with self._or_later():
            names = ["step", *self._columns, *(name for row in self._rows for name in row)]
            columns = list(dict.fromkeys(names))
            if columns != self._columns:
                steps = {str(row["step"]) for row in self._rows}
                kept = [row for row in read_cells(path) if row["step"] not in steps]
                self._replace_rows(kept, columns)
            else:
                if self._offset is None:
                    self._offset = path.stat().st_size
                _put(path, self._newest_rows(columns), self._offset)
            self._is_written = True

    def _newest_rows(self, columns: list[str]) -> str:
        text = io.StringIO(newline="")
        for row in self._rows:
            formatted = {name: _format(value) for name, value in row.items()}
            csv.DictWriter(text, columns).writerow(formatted)
        return text.getvalue()

    @contextlib.contextmanager
    def _or_later(self) -> Iterator[None]:
        """What a full disk does not take is kept, and written with what comes next."""
        try:
            yield
        except OSError as error:
            if not self._has_told:
                LOGGER.error(f"{self._folder} takes no rows now: {error.strerror}; they are kept")
            self._has_told = True

    def _replace_rows(self, rows: list[dict[str, str]], columns: list[str]) -> None:
        """The whole file anew, by one rename: these rows, then the newest."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        before = text.getvalue()
        write_atomically(self._folder / METRICS_FILE, before + self._newest_rows(columns))
        self._columns, self._offset = columns, len(before.encode())


def _put(path: Path, text: str, offset: int) -> int:
    """Let a file end with a text that begins at a byte; the new end."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(text.encode())
        file.truncate()
        return file.tell()


def _format(value: float) -> str:
    """Whole numbers in full; others in 9 digits, which hold every float32 exactly."""
    return str(int(value)) if float(value).is_integer() else f"{value:.9g}"
