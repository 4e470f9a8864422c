"""The rows of metrics.csv as TensorBoard's event files, events and samples as text. One record a row, 0.2 ms."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from recipes.errors import ConfigError
from recipes.logger.tensorboard_records import (
    event_text,
    hyperparameter_records,
    row_record,
    sample_text,
    start_record,
    text_record,
    verbatim,
)
from recipes.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    read_json_lines,
    read_rows,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import FileWriter

LOGGER = logging.getLogger("lightning_recipes")
FOLDER = "tensorboard"
FLUSH_SECONDS = 30  # what is logged is on the disk within them
MAX_QUEUE = 1000  # records that wait for the disk before training does
_AT_START, _AT_RESUME, _AT_SAVE = "start", "resume", "checkpoint"
_AT_END = ("end", "preempted")


class TensorBoardLogger(Logger):
    """Writes to `tensorboard/` in the run folder, behind training; stands after the CsvLogger, whose files it reads.

    All that is logged for one optimizer step is one record, written when the next step is logged, a checkpoint is
    done or the run ends. A step that is gone back to, by a resume or a rollback, ends what came after it: no point
    is there twice.

    Args:
        run_folder: Of the run.

    Raises:
        ConfigError: The package tensorboard is not installed.
    """

    def __init__(self, *, run_folder: Path) -> None:
        super().__init__()
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "logger=tensorboard", str(error), "pip install -e '.[tensorboard]'"
            ) from error
        self._run_folder = Path(run_folder)
        self._writer: FileWriter | None = None
        self._step = 0  # of the row, completed
        self._row: dict[str, float] = {}  # that is not written yet
        self._num_samples = 0  # lines of samples.jsonl that are behind us
        self._has_failed = False

    @property
    def name(self) -> str:
        return "tensorboard"

    @property
    def version(self) -> str:
        return self._run_folder.name

    @property
    def save_dir(self) -> str:
        return str(self._run_folder)

    @property
    def log_dir(self) -> str:
        return str(self._run_folder / FOLDER)

    @property
    @rank_zero_experiment
    def experiment(self) -> "FileWriter":
        """Made when something is written first, on rank 0."""
        if self._writer is None:
            from torch.utils.tensorboard import FileWriter

            is_first = not Path(self.log_dir).exists()
            self._writer = FileWriter(self.log_dir, MAX_QUEUE, FLUSH_SECONDS)
            if is_first:  # TensorBoard takes the first start that it reads for no restart
                self._writer.add_event(start_record(), 0)
        return self._writer

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: they are read from config.yaml when the run starts."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add to the row of a step. Lightning counts from 0; here 1 is the first, as in metrics.csv."""
        assert step is not None, "Lightning always names the step"
        if step + 1 != self._step:
            self._write_row()
            self._step = step + 1
        self._row |= {name: value for name, value in metrics.items() if name != "epoch"}

    @rank_zero_only
    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """One text; with it what there is to show at the beginning, at a checkpoint and at the end."""
        self._write_event({"time": time.time(), "step": step, "event": event} | fields)
        if event in (_AT_START, _AT_RESUME):
            self._write_config(step, with_hyperparameters=event == _AT_START)
        if event == _AT_SAVE:
            self._flush()
        if event in _AT_END:
            self._write_summary(step)
            self._flush()

    @rank_zero_only
    def resume_at(self, step: int, *, num_rollbacks: int = 0) -> None:
        """Go on in the same folder after a step, as metrics.csv does, which has been cut there."""
        saved = [
            one
            for one in read_json_lines(self._run_folder / EVENTS_FILE)
            if one["event"] == _AT_SAVE
        ]
        # what was logged since the checkpoint before may not have reached the disk
        before = [one["step"] for one in saved if one["step"] < step]
        has_files = Path(self.log_dir).exists()
        self._go_on_after(step, since=max(before) if before and has_files else 1)

    @rank_zero_only
    def on_rollback(self, trainer: Any, pl_module: Any, from_step: int, to_step: int) -> None:
        """What came after the step gone back to is shown no more."""
        self._write_samples()
        self._go_on_after(to_step, since=to_step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """All that was logged is on the disk; an event may still come."""
        if self._writer is not None or self._row:
            self._flush()

    def _go_on_after(self, step: int, *, since: int) -> None:
        """TensorBoard drops all from a restart's step on: what stays of it is written again."""
        since = max(since, 1)  # at 0 there are the config and the start
        self._row = {}
        self._write(lambda writer: writer.add_event(start_record(), since))
        rows = _rows_of_steps(self._run_folder / METRICS_FILE, range(since, step + 1))
        for self._step, self._row in rows.items():
            if self._step < step:  # at the step itself a validation may still be to come
                self._write_row()
        for event in read_json_lines(self._run_folder / EVENTS_FILE):
            if event["step"] >= since:
                self._write_event(event)
        samples = read_json_lines(self._run_folder / SAMPLES_FILE)
        for sample in samples:
            if since <= sample["step"] <= step:
                self._write_text("sample", sample_text(sample), sample["step"])
        self._num_samples = len(samples)

    def _flush(self) -> None:
        self._write_row()
        self._write_samples()
        self._write(lambda writer: writer.flush())

    def _write_row(self) -> None:
        if self._row:
            row, self._row = self._row, {}
            self._write_record(row_record(row), self._step)

    def _write_event(self, event: Mapping[str, Any]) -> None:
        self._write_text(*event_text(event), event["step"], event["time"])

    def _write_config(self, step: int, *, with_hyperparameters: bool) -> None:
        path = self._run_folder / CONFIG_FILE
        if not path.is_file():
            return
        config = path.read_text()
        self._write_text("config", verbatim(config), step)
        for record in hyperparameter_records(config) if with_hyperparameters else ():
            self._write_record(record, step)

    def _write_summary(self, step: int) -> None:
        path = self._run_folder / SUMMARY_FILE
        if path.is_file():
            self._write_text("summary", verbatim(path.read_text()), step)

    def _write_samples(self) -> None:
        samples = read_json_lines(self._run_folder / SAMPLES_FILE)
        for sample in samples[self._num_samples :]:
            self._write_text("sample", sample_text(sample), sample["step"])
        self._num_samples = len(samples)

    def _write_text(self, tag: str, text: str, step: int, at: float | None = None) -> None:
        self._write_record(text_record(tag, text), step, at)

    def _write_record(self, record: Any, step: int, at: float | None = None) -> None:
        self._write(lambda writer: writer.add_summary(record, step, at))

    def _write(self, put: Callable[["FileWriter"], None]) -> None:
        """A disk that takes no more ends these files, not the run."""
        if self._has_failed:
            return
        try:
            put(self.experiment)
        except OSError as error:
            self._has_failed = True
            LOGGER.error(
                f"{self.log_dir} takes nothing more: {error.strerror}; {METRICS_FILE} has every row"
            )


def _rows_of_steps(path: Path, steps: range) -> dict[int, dict[str, float]]:
    rows = (row for row in read_rows(path) if int(row["step"]) in steps)
    return {int(row.pop("step")): row for row in rows}
