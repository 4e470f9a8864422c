"""Write metrics rows as TensorBoard event files; events, samples and the config as text. About 0.2 ms per row."""

import logging
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from recipes.errors import ConfigError, type_extra
from recipes.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    read_events,
    read_rows,
    read_samples,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOGGER = logging.getLogger("lightning_recipes")
FOLDER = "tensorboard"
FLUSH_SECONDS = 30  # a killed process loses at most the records of this interval
MAX_QUEUE = 1000  # queued records before training waits for the disk
_NO_HYPERPARAMETERS = ("mode", "dashboard", "callbacks", "logger", "hydra", "resume", "tags")


class TensorBoardLogger(Logger):
    """Writes to `tensorboard/` in the run folder, in a background thread.

    Comes after the CsvLogger, whose files it reads. All metrics of an optimizer step form one record, written when
    the next step is logged, at a checkpoint or at the end of the run. A resume or a rollback opens a new file
    with `purge_step`, which makes TensorBoard drop everything from that step on, and writes again what is still valid.

    Args:
        run_folder: The run folder.

    Raises:
        ConfigError: The package tensorboard is not installed.
    """

    def __init__(self, *, run_folder: Path) -> None:
        super().__init__()
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise ConfigError("logger=tensorboard", str(error), type_extra("tensorboard")) from error
        self._run_folder = Path(run_folder)
        self._writer: SummaryWriter | None = None
        self._step = 0  # completed optimizer steps at the pending row
        self._row: dict[str, float] = {}  # pending, not written yet
        self._num_samples = 0  # lines of samples.jsonl that are written
        self._has_failed = False

    @property
    @override
    def name(self) -> str:
        return "tensorboard"

    @property
    @override
    def version(self) -> str:
        return self._run_folder.name

    @property
    @override
    def log_dir(self) -> str:
        return str(self._run_folder / FOLDER)

    @property
    @rank_zero_experiment
    def experiment(self) -> "SummaryWriter | None":
        """Return the writer; None before the first record, so that a failed resume leaves no file."""
        return self._writer

    @override
    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: they are read from config.yaml when the run starts."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add to the row of a step, without one to the newest. Lightning counts from 0; here 1 is the first."""
        row_step = max(self._step, 1) if step is None else step + 1
        if row_step != self._step:
            self._write_row()
            self._step = row_step
        self._row |= {name: value for name, value in metrics.items() if name != "epoch"}

    @rank_zero_only
    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """Write an event as text; also the config at the start, and the summary at the end."""
        self._write_event({"time": time.time(), "step": step, "event": event} | fields)
        if event in ("start", "resume"):
            self._write_file("config", CONFIG_FILE, step)
        if event == "start":
            self._write_hyperparameters()
        if event in ("end", "preempted"):
            self._write_file("summary", SUMMARY_FILE, step)
        if event in ("checkpoint", "end", "preempted"):
            self._flush()

    @rank_zero_only
    def resume_at(self, step: int, *, num_rollbacks: int = 0) -> None:
        """Continue after a step; rows lost in a kill are rewritten from metrics.csv.

        Args:
            step: Completed optimizer steps.
            num_rollbacks: Not used: metrics.csv and events.jsonl have already dropped rolled-back rows.
        """
        events = read_events(self._run_folder / EVENTS_FILE)
        # everything up to the checkpoint before this one was flushed; later rows may be missing
        flushed = [e["step"] for e in events if e["event"] == "checkpoint" and e["step"] < step]
        has_files = Path(self.log_dir).exists()
        self._restart(step, purge_step=max(flushed, default=1) if has_files else 1)

    @rank_zero_only
    def on_rollback(self, trainer: Any, pl_module: Any, from_step: int, to_step: int) -> None:
        """Drop everything logged after the step that was rolled back to."""
        self._write_samples()
        self._restart(to_step, purge_step=to_step)

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Flush everything that was logged; an event may still follow."""
        if self._writer is not None or self._row:
            self._flush()

    def _get_writer(self) -> Any:  # torch's type stubs lack `file_writer`
        # TensorBoard ignores the first restart marker that it reads, so the first file needs one too
        return self._writer or self._open(purge_step=0)

    def _open(self, *, purge_step: int) -> "SummaryWriter":
        """Open a new file. TensorBoard drops data from `purge_step` on."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            self._writer.close()
        else:
            _report_thread_errors(self._fail)
        self._writer = SummaryWriter(self.log_dir, purge_step=purge_step, max_queue=MAX_QUEUE, flush_secs=FLUSH_SECONDS)
        return self._writer

    def _restart(self, step: int, *, purge_step: int) -> None:
        """Open a file that purges from `purge_step` on, and rewrite the valid data between it and `step`."""
        purge_step = max(purge_step, 1)  # the config and the start are at step 0
        self._row = {}
        self._try(lambda: self._open(purge_step=purge_step))
        for row in read_rows(self._run_folder / METRICS_FILE):
            row_step = int(row.pop("step"))
            if purge_step <= row_step <= step:
                self._write_row()
                self._step, self._row = row_step, row
        if self._step < step:
            self._write_row()  # else keep it pending: a validation at that step may still follow
        for event in read_events(self._run_folder / EVENTS_FILE):
            if event["step"] >= purge_step:
                self._write_event(event)
        samples = read_samples(self._run_folder / SAMPLES_FILE)
        for sample in samples:
            if purge_step <= sample["step"] <= step:
                self._write_sample(sample)
        self._num_samples = len(samples)

    def _flush(self) -> None:
        self._write_row()
        self._write_samples()
        self._try(lambda: self._get_writer().flush())

    def _write_row(self) -> None:
        """Write the pending row as one record: 0.15 ms for 20 metrics, where `add_scalar` per metric takes 2 ms."""
        row, self._row = self._row, {}
        if row:
            from tensorboard.compat.proto.summary_pb2 import Summary

            values = [Summary.Value(tag=tag, simple_value=row[tag]) for tag in row]  # float32
            self._write(Summary(value=values), self._step)

    def _write_event(self, event: Mapping[str, Any]) -> None:
        """Write a line of events.jsonl under a tag per kind: TensorBoard sorts the texts of a tag by step."""
        kind, step, wall_time = event["event"], event["step"], event.get("time")
        fields = [f"{k} {v}" for k, v in event.items() if k not in ("time", "step", "event")]
        self._write_text(f"events/{kind}", ", ".join(fields) or kind, step, wall_time)

    def _write_file(self, tag: str, name: str, step: int) -> None:
        path = self._run_folder / name
        if path.is_file():
            self._write_text(tag, _verbatim(path.read_text(encoding="utf-8")), step)

    def _write_hyperparameters(self) -> None:
        """Write the values of config.yaml, so that TensorBoard can compare runs by them.

        `add_hparams` would create a separate run.
        """
        from torch.utils.tensorboard.summary import hparams

        path = self._run_folder / CONFIG_FILE
        if not path.is_file():
            return
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        values = {key: node for key, node in config.items() if key not in _NO_HYPERPARAMETERS}
        metrics = dict.fromkeys(("train/loss", config["checkpoint"]["monitor"]), 0.0)  # which says what is better
        experiment, session_start, _ = hparams(dict(_leaves(values)), metrics)
        self._write(experiment, 0)
        self._write(session_start, 0)

    def _write_samples(self) -> None:
        samples = read_samples(self._run_folder / SAMPLES_FILE)
        for sample in samples[self._num_samples :]:
            self._write_sample(sample)
        self._num_samples = len(samples)

    def _write_sample(self, sample: Mapping[str, Any]) -> None:
        self._write_text("sample", _verbatim(sample["prompt"] + sample["text"]), sample["step"])

    def _write_text(self, tag: str, text: str, step: int, at: float | None = None) -> None:
        self._try(lambda: self._get_writer().add_text(tag, text, step, at))

    def _write(self, summary: Any, step: int) -> None:
        self._try(lambda: self._get_writer().file_writer.add_summary(summary, step))

    def _try(self, call: Callable[[], object]) -> None:
        """Call the writer; a write error (full disk) stops TensorBoard logging with one log line, not the run."""
        if self._has_failed:
            return
        try:
            call()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            LOGGER.error(
                f"{self.log_dir} cannot be written to any more: {error.strerror}; {METRICS_FILE} has every row"
            )


def _report_thread_errors(report: Callable[[OSError], None]) -> None:
    """Report a write error that ends TensorBoard's thread; Python would print its traceback."""
    print_traceback = threading.excepthook

    def hook(arguments: Any) -> None:
        is_writer = type(arguments.thread).__module__.startswith("tensorboard.")
        if is_writer and isinstance(arguments.exc_value, OSError):
            report(arguments.exc_value)
        else:
            print_traceback(arguments)

    threading.excepthook = hook


def _verbatim(text: str) -> str:
    """Return Markdown that shows text verbatim."""
    return textwrap.indent(text, "    ")


def _leaves(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value under its dotted key; lists as text, null values skipped."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        elif value is not None and key != "_partial_":
            yield f"{path}{key}", str(value) if isinstance(value, list) else value
