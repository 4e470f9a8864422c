"""Log one row per logged optimizer step to all loggers in a single call; write metrics.csv and events.jsonl.

A row costs about 0.2 ms; Lightning's `log` takes that per metric. Rows and events are on disk as soon as logged.
"""

import csv
import functools
import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from recipes.after_module import AfterModule
from recipes.files import LineFile, count, get_causes, replace_end, tolerating, write_atomically
from recipes.lightning_internals import align_row_step, align_validation_step, get_callbacks
from recipes.run_folder import (
    EVENTS_FILE,
    METRICS_FILE,
    ROLLED_BACK_FOLDER,
    as_numbers,
    check_metrics,
    complete_lines,
    read_cells,
    read_events,
)

LOGGER = logging.getLogger("lightning_recipes")
# Events of the run itself about a process or the disk: a resume does not drop them. A callback declares its own with
# `kept_on_resume`, see `callbacks.events.EventKind`.
PROCESS_EVENTS = ("start", "resume", "checkpoint_rejected", "checkpoint_failed", "preempted", "oom", "stop", "end")


class RowWriter(AfterModule):
    """Passes the row collected by the task and the earlier callbacks to every logger.

    It comes before the checkpoint saver, so that no checkpoint is ahead of its own row. A callback with an
    `after_row(trainer, pl_module)` method is called once the row of a step is written and before the step is saved.
    """

    @override
    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        align_row_step(trainer)

    @override
    def end_batch(self, trainer: lightning.Trainer, pl_module: Any, outputs: Any) -> None:
        if hasattr(pl_module, "recipes_add_step"):  # a module of one's own
            pl_module.recipes_add_step(outputs)
        self._write_row(trainer, pl_module)
        if not pl_module.automatic_optimization:
            align_validation_step(trainer)
        for callback in get_callbacks(trainer):
            if hasattr(callback, "after_row"):
                callback.after_row(trainer, pl_module)

    @override
    def end_validation(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and trainer.should_stop:
            self._write_last(trainer, pl_module)

    @override
    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._write_last(trainer, pl_module)

    def _write_last(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Write the row of the last step, so that the loss with which a run ends is known however it ends."""
        pl_module.recipes_log_last_step()
        self._write_row(trainer, pl_module)

    @staticmethod
    def _write_row(trainer: lightning.Trainer, pl_module: Any) -> None:
        row, pl_module.recipes_row = pl_module.recipes_row, {}
        if not row:
            return
        scalars = {name: float(value) for name, value in row.items()}  # synchronizes with the device
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step - 1)  # Lightning counts from 0
        tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
        trainer.callback_metrics.update(tensors)  # for callbacks that monitor a metric


class CsvLogger(Logger):
    """Writes metrics.csv, with one row per logged optimizer step, and events.jsonl.

    Rows and events that a full disk rejects stay in memory and are written with the next ones; those that are still
    missing at the end are named.

    Args:
        run_folder: The run folder.
    """

    def __init__(self, *, run_folder: Path) -> None:
        super().__init__()
        self._folder = Path(run_folder)
        self._path = self._folder / METRICS_FILE
        self._events = EventFile(run_folder=self._folder)
        self._columns: list[str] = []  # of the file; empty until the first row
        self._rows: list[dict[str, float]] = []  # unwritten rows, then the newest row
        self._offset: int | None = None  # bytes of the file before `_rows`; None: the whole file
        self._is_written = True
        self._experiment = NoExperiment(
            f"{METRICS_FILE} keeps nothing of %s(…); a logger such as logger=tensorboard does, from on_train_start on"
        )

    @property
    @override
    def name(self) -> str:
        return "csv"

    @property
    @override
    def version(self) -> str:
        return self._folder.name

    @property
    @override
    def log_dir(self) -> str:
        return str(self._folder)

    @property
    @rank_zero_experiment
    def experiment(self) -> "NoExperiment":
        """Return what takes the calls that a module makes of the experiment of another logger."""
        return self._experiment

    @override
    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml holds them."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add to the row of a step. Lightning counts from 0; the file counts completed steps, so 1 is the first.

        What a module logs without a step, or with the number of something else, belongs to the newest row.
        """
        step = self.find_row(step)
        if not self._rows or self._rows[-1]["step"] != step + 1:
            if self._is_written:
                self._rows, self._offset = [], None
            self._rows.append({"step": step + 1})
        self._rows[-1] |= {name: value for name, value in metrics.items() if name != "epoch"}
        self._write_rows()

    def find_row(self, step: int | None) -> int:
        """Return the step, counted from 0, of the row that a module logs to: never one before the newest."""
        newest = int(self._rows[-1]["step"]) - 1 if self._rows else 0
        return newest if step is None else max(step, newest)

    @rank_zero_only
    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """Append one event to events.jsonl."""
        self._events.append(event, step, **fields)
        if event in ("end", "preempted"):  # the last of a run
            self._events.finish()

    @rank_zero_only
    def has_event(self, event: str, step: int) -> bool:
        """Return whether an event of a step is in events.jsonl."""
        return (event, step) in [(e["event"], e["step"]) for e in read_events(self._folder / EVENTS_FILE)]

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Retry writing the rows that a full disk rejected, and name those that are missing."""
        if not self._is_written:
            self._write_rows()
        if not self._is_written:
            first, last = (int(self._rows[index]["step"]) for index in (0, -1))
            steps = f"of step {first}" if first == last else f"of steps {first} to {last}"
            LOGGER.error(f"{self._path} lacks {count(len(self._rows), 'row')}, {steps}: {get_causes(self._path)}")

    @rank_zero_only
    def resume_at(self, step: int, *, num_rollbacks: int = 0) -> None:
        """Drop the rows and events after a step: the run continues from there and logs them again.

        Args:
            step: Completed optimizer steps.
            num_rollbacks: Rollbacks before that checkpoint; earlier events stay, whatever their step.
        """
        self._drop_rows_after(step)
        self._events.drop_after(step, num_rollbacks=num_rollbacks)

    @rank_zero_only
    def on_rollback(self, trainer: Any, pl_module: Any, from_step: int, to_step: int) -> None:
        """Move the rows after the step that was rolled back to into a separate file."""
        dropped = [row for row in read_cells(self._path) if int(row["step"]) > to_step]
        if dropped:
            path = self._folder / ROLLED_BACK_FOLDER / f"steps_{to_step + 1:07d}_to_{from_step:07d}.csv"
            with tolerating(path):
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, _csv_text(list(dropped[0]), dropped, header=True))
        with tolerating(self._path):
            self._drop_rows_after(to_step)

    def _drop_rows_after(self, step: int) -> None:
        """Truncate rows at the end of the file, which needs no space and so succeeds on a full disk."""
        check_metrics(self._path)
        unwritten = [] if self._is_written else [row for row in self._rows if row["step"] <= step]
        content = self._path.read_bytes() if self._path.is_file() else b""
        complete = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
        header, *lines = complete or [b""]
        lines = [line for line in lines if line.strip() and int(line.partition(b",")[0]) <= step]
        self._columns = next(csv.reader([header.decode()]), [])
        # the row of the step itself stays in memory: a validation at that step may still follow
        cells = csv.DictReader([line.decode() for line in (header, *lines[-1:])])
        newest = [as_numbers(row) | {"step": step} for row in cells if int(row["step"]) == step]
        self._rows = unwritten or newest
        in_memory = {int(row["step"]) for row in self._rows}
        self._offset = len(b"".join([header, *(n for n in lines if int(n.partition(b",")[0]) not in in_memory)]))
        if content:
            # last: if it fails, the next row still replaces everything after the offset
            os.truncate(self._path, len(b"".join([header, *lines])))
        if unwritten:
            self._write_rows()

    def _write_rows(self) -> None:
        """Write the unwritten rows and the newest row, replacing it if it is already on disk."""
        self._is_written = False
        with tolerating(self._path):
            columns = list(dict.fromkeys(["step", *self._columns, *(n for r in self._rows for n in r)]))
            cells = [{name: _format(value) for name, value in row.items()} for row in self._rows]
            newest = _csv_text(columns, cells, header=False)
            if columns != self._columns:  # the whole file again, atomically
                steps = {row["step"] for row in cells}
                before = [row for row in read_cells(self._path) if row["step"] not in steps]
                text = _csv_text(columns, before, header=True)
                write_atomically(self._path, text + newest)
                self._columns, self._offset = columns, len(text.encode())
            else:
                if self._offset is None:
                    self._offset = self._path.stat().st_size
                replace_end(self._path, newest, self._offset)
            self._is_written = True


class NoExperiment:
    """Takes what a module calls of another logger's experiment, such as `add_image`, and says so once for each.

    Args:
        line: What is said, with %s for the name.
    """

    def __init__(self, line: str) -> None:
        self._line = line
        self._called: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(self._skip, name)

    def add_figure(self, tag: str, figure: Any, global_step: Any = None, close: bool = True, **kwargs: Any) -> None:
        """Close figures of matplotlib, as TensorBoard does: pyplot keeps all others until the process ends."""
        self._skip("add_figure")
        if close:
            from matplotlib import pyplot

            for each in figure if isinstance(figure, list) else [figure]:
                pyplot.close(each)

    def _skip(self, name: str, *args: Any, **kwargs: Any) -> None:
        if name not in self._called:
            self._called.add(name)
            LOGGER.warning(self._line, name)


class NoLogger(Logger):
    """Takes what a module of one's own logs in a mode that does not train.

    Args:
        run_folder: The run folder, for files that the module writes beside its logger.
        mode: Name of the mode.
    """

    def __init__(self, *, run_folder: Path, mode: str) -> None:
        super().__init__()
        self._folder = Path(run_folder)
        self._experiment = NoExperiment(f"mode={mode} keeps nothing of %s(…); its metrics are those of self.log")

    @property
    @override
    def name(self) -> str:
        return "none"

    @property
    @override
    def version(self) -> str:
        return self._folder.name

    @property
    @override
    def log_dir(self) -> str:
        return str(self._folder)

    @property
    @rank_zero_experiment
    def experiment(self) -> NoExperiment:
        """Return what takes the calls of the module."""
        return self._experiment

    @override
    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml holds them."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Do nothing: the mode writes what Lightning returns."""


class AllLoggers(Logger):
    """All loggers of a run as one, which a module has as `self.logger`: rows go to each of them.

    Args:
        csv_logger: Decides of which step a row is, and where the module may write files.
        others: The experiment is that of the first of them; before training has started, none of them has one.
    """

    def __init__(self, csv_logger: CsvLogger, others: Sequence[Any]) -> None:
        super().__init__()
        self._csv_logger, self._others = csv_logger, others

    @property
    @override
    def name(self) -> str:
        return self._csv_logger.name

    @property
    @override
    def version(self) -> str:
        return self._csv_logger.version

    @property
    @override
    def log_dir(self) -> str:
        return self._csv_logger.log_dir

    @property
    def experiment(self) -> Any:
        """Return the experiment of the first other logger that has one, else what skips all calls."""
        experiments = (logger.experiment for logger in self._others)
        return next((each for each in experiments if each is not None), self._csv_logger.experiment)

    @override
    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: each logger has config.yaml."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add to the row of a step, as `CsvLogger.log_metrics` does."""
        step = self._csv_logger.find_row(step)
        for logger in (self._csv_logger, *self._others):
            logger.log_metrics(dict(metrics), step)


def offer_all_loggers(trainer: lightning.Trainer) -> None:
    """Make `trainer.logger`, and so `self.logger` of a module, all loggers as one; Lightning's is the first alone."""
    others = [logger for logger in trainer.loggers if not isinstance(logger, CsvLogger)]
    for csv_logger in trainer.loggers:
        if isinstance(csv_logger, CsvLogger) and others:
            untyped: Any = trainer
            untyped.__class__ = _OffersAll
            untyped.all_loggers = AllLoggers(csv_logger, others)


class _OffersAll(lightning.Trainer):
    all_loggers: AllLoggers

    @property
    @override
    def logger(self) -> Logger | None:
        return self.all_loggers

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        raise AttributeError("a run keeps its loggers")


class EventFile:
    """Appends events to events.jsonl.

    Args:
        run_folder: The run folder.
    """

    def __init__(self, *, run_folder: Path) -> None:
        self._path = run_folder / EVENTS_FILE
        self._lines = LineFile(self._path)

    def append(self, event: str, step: int, **fields: Any) -> None:
        """Write one event; if the disk is full, with the next one."""
        self._lines.append([json.dumps({"time": round(time.time(), 3), "step": step, "event": event} | fields)])

    def finish(self) -> None:
        """Name the events that could not be written."""
        self._lines.finish()

    def drop_after(self, step: int, *, num_rollbacks: int) -> None:
        """Drop the events that training will repeat after a resume, and a last line torn by a kill.

        Args:
            step: Completed optimizer steps of the checkpoint.
            num_rollbacks: Rollbacks before the checkpoint; earlier events stay, whatever their step.
        """
        if not self._path.is_file():
            return
        lines = [line for line in complete_lines(self._path) if line.strip()]
        events = read_events(self._path)
        rollbacks = [n for n, event in enumerate(events) if event["event"] == "rollback"]
        last_rollback = [-1, *rollbacks][min(num_rollbacks, len(rollbacks))]
        valid = [
            line
            for n, (line, event) in enumerate(zip(lines, events, strict=True))
            if n <= last_rollback
            or event["step"] <= step
            or event["event"] in PROCESS_EVENTS
            or event.get("kept_on_resume", False)
        ]
        write_atomically(self._path, "".join(valid))


def _csv_text(columns: list[str], rows: Iterable[Mapping[str, str]], *, header: bool) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _format(value: float) -> str:
    """Format integers in full and other values with 9 digits, which represent every float32 exactly."""
    return str(int(value)) if float(value).is_integer() else f"{value:.9g}"
