"""Logging of a run to the console and to train.log, with known noise filtered out."""

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from typing_extensions import override

from recipes.errors import escape_controls
from recipes.files import append, count, get_causes, tolerating
from recipes.runtime.status import hidden

LOGGER = logging.getLogger("lightning_recipes")

# Messages that do not help users of these recipes, each with its origin.
_NOISY_LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",  # device and accelerator banners, tips
    "lightning.pytorch.accelerators.cuda",
    "lightning.fabric.utilities.seed",
    "lightning.fabric.utilities.distributed",  # "Initializing distributed", one line per rank
    "lightning.pytorch.callbacks.model_summary",
    "lightning.pytorch.strategies.deepspeed",  # "initializing deepspeed distributed", one line per rank
    "lightning.pytorch.trainer.connectors.signal_connector",  # runtime/signals.py logs the signal
    "torch.distributed.elastic.multiprocessing.redirects",
)
_NOISY_WARNINGS = (
    r".*does not have many workers.*",  # Lightning; a memory-mapped dataset needs none
    r".*LeafSpec.*is deprecated.*",  # Lightning 2.6 on torch 2.13, from its use of _pytree
    r".*isinstance\(treespec, LeafSpec\).*",
    r".*resuming from a checkpoint that ended before the epoch ended.*",  # a stream has no epochs
    r".*Found .* module\(s\) in eval mode at the start of training.*",
    r".*The `srun` command is available on your system but is not used.*",  # running without srun is intended
    r".*GPU available but not used.*",  # the user asked for the CPU
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*The epoch parameter in `scheduler.step\(\)`.*",
    r".*Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`.*",  # a skipped fp16 step
    r".*`isinstance\(treespec.*",
    r".*Since DeepSpeed handles gradient clipping internally.*",  # intended: the task leaves clipping to DeepSpeed
    r".*`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated.*",  # torch's own use
    r".*`broadcast_buffers` is deprecated.*",  # torch; the replacement has no such argument yet
    r".*TensorFloat32 tensor cores for float32 .* available but not enabled.*",  # by intent: precision=tf32 does it
    r".*It is recommended to use `self.log\(.*sync_dist=True.*",  # the task reduces over ranks itself
)


class _PlainFormatter(logging.Formatter):
    """Escapes control characters, which sampled text and file names may contain."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Goes on when the console takes no lines: a file on a full disk, or a pipe that was closed, as by `| head`."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        # what could not be written stays in the stream's buffer and comes with the next line
        with tolerating(Path("the console")), hidden():
            super().emit(record)

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            raise error
        if not isinstance(error, BrokenPipeError):
            super().handleError(record)
            return
        self.setLevel(logging.CRITICAL + 1)  # not removed: the logger is iterating over its handlers
        # buffered output would fail again at interpreter exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        LOGGER.warning("The console is closed: further lines go only to train.log")


class _LogFile(logging.Handler):
    """Appends whole lines to a file, and writes into it how many a full disk has rejected.

    Args:
        path: The file. An incomplete last line of a killed run gets an end.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._num_missing = 0
        append(path, "", keeps_torn=True)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        gap = f"({count(self._num_missing, 'line')} missing: the disk was full)\n" if self._num_missing else ""
        # counted first: the message that this file cannot be written comes here, too
        self._num_missing += 1
        with tolerating(self._path):
            append(self._path, f"{gap}{self.format(record)}\n")
            self._num_missing = 0

    @override
    def close(self) -> None:
        if self._num_missing:
            LOGGER.error(f"{self._path} lacks its last {count(self._num_missing, 'line')}: {get_causes(self._path)}")
        super().close()


class _ConsoleFilter(logging.Filter):
    """Drops records meant only for the file (`extra={"console": False}`)."""

    def filter(self, record: logging.LogRecord) -> bool:
        return getattr(record, "console", True)


def accept_any_text() -> None:
    """Print characters outside the locale's encoding (such as ASCII) as escapes instead of raising."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print an answer; what its reader no longer takes, as of `--help | head`, is dropped."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_console(log_file: Path | None = None, *, speaks: bool = True) -> None:
    """Log to the console and, if given, also to a file; silence known noise.

    Args:
        log_file: File for a copy of every line; None logs only to the console.
        speaks: False on all ranks but one, as their messages are the same: shows only warnings.
    """
    LOGGER.setLevel(logging.INFO if speaks else logging.WARNING)
    LOGGER.propagate = False
    for handler in reversed(LOGGER.handlers):
        handler.close()  # a file that lacks lines says so on the console, which comes before it
    LOGGER.handlers.clear()
    accept_any_text()
    console = ConsoleHandler(sys.stdout)
    console.addFilter(_ConsoleFilter())
    LOGGER.addHandler(console)
    if log_file is not None:
        LOGGER.addHandler(_LogFile(log_file))
    for handler in LOGGER.handlers:
        handler.setFormatter(_PlainFormatter())
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for pattern in _NOISY_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)


@contextlib.contextmanager
def restoring_console() -> Iterator[None]:
    """Take back on leaving what `open_console` changes, in a process that goes on after a run."""
    loggers = [LOGGER, *map(logging.getLogger, _NOISY_LOGGERS)]
    levels, propagates, handlers = [logger.level for logger in loggers], LOGGER.propagate, [*LOGGER.handlers]
    errors = sys.stdout.errors if isinstance(sys.stdout, io.TextIOWrapper) else None
    LOGGER.handlers.clear()  # those of the process, which `open_console` would close
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for handler in reversed(LOGGER.handlers):
            handler.close()
        LOGGER.handlers[:] = handlers
        LOGGER.propagate = propagates
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if errors is not None and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors=errors)
