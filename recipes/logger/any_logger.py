"""Log to any logger of Lightning or of another package: MLflow, Aim, Comet, or one of your own.

It gets what metrics.csv has: the same names, the same steps, one call per row, in a thread of its own, so that training
does not wait for a service: a row of 24 metrics takes MLflow half a second in a database on this machine. A resumed run
goes on in the run that the service knows; the values of steps that a run repeats, after a resume or a rollback, are
logged once more.
"""

import inspect
import json
import logging
import queue
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.files import tolerating, write_atomically
from recipes.run_folder import CONFIG_FILE, METRICS_FILE, read_rows

LOGGER = logging.getLogger("lightning_recipes")
# in the run folder, for each logger by its name: the run of the service, and the last step that it is known to have
RUNS_FILE = "logger_runs.json"
_RUNS_LOCK = threading.Lock()  # each logger has a thread, and all have this one file
_ID_PARAMETERS = ("run_id", "run_hash", "experiment_key")  # a run that exists: MLflow, Aim, Comet
_PIP = re.compile(r"pip install [^`]+")  # in what Lightning says of a package that is not installed
_BEFORE_EXIT = ("end", "preempted")
_FLUSH_SECONDS = 60.0  # at the end of a run, for rows that are not sent yet


class AnyLogger(Logger):
    """Passes each row of metrics.csv to another logger, once the row is complete.

    The other one is constructed when training has started, so that a failed resume opens no run. What it raises later
    ends its rows with one line in the log, not the training.

    Args:
        key: Its place in the config, such as `logger.mlflow`.
        construct: Constructs it; takes its `run_id`, or the like, if it can go on in a run that exists.
        run_folder: The run folder.
    """

    def __init__(self, *, key: str, construct: Callable[..., Any], run_folder: Path) -> None:
        super().__init__()
        self._key, self._construct, self._run_folder = key, construct, Path(run_folder)
        self._logger: Any = None  # the other logger, from the start of training on
        self._has_failed = False
        self._step = 0  # completed optimizer steps at the pending row
        self._row: dict[str, float] = {}  # pending, not passed on yet
        self._calls: queue.SimpleQueue[Callable[[Logger], object] | threading.Event] = queue.SimpleQueue()
        self._run: dict[str, Any] = {}  # our entry of RUNS_FILE

    @property
    @override
    def name(self) -> str | None:
        return self._key.rpartition(".")[2]

    @property
    @override
    def version(self) -> str | None:
        """Return the id of the service's run; None before it is opened."""
        return self._run.get("run")

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Return what the other logger has as its experiment; None if it has none or training has not started."""
        return getattr(self._logger, "experiment", None)

    @override
    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml is logged when the run starts."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add to the row of a step, without one to the newest. Lightning counts from 0; here 1 is the first."""
        row_step = max(self._step, 1) if step is None else step + 1
        if row_step != self._step:
            self._pass_on_row()
            self._step = row_step
        self._row |= {name: value for name, value in metrics.items() if name != "epoch"}

    @rank_zero_only
    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """Open the service's run when this one starts or goes on; wait for what is not sent yet before it may end.

        Raises:
            ConfigError: The other logger cannot be constructed; nothing has been trained then.
        """
        if event in ("start", "resume") and self._logger is None:
            self._open(step, logs_config=event == "start")
        elif event == "checkpoint":
            if self._step <= step:  # the checkpoint may be of an earlier step, and a later row still grow
                self._pass_on_row()
            self._remember_sent(step)
        elif event in _BEFORE_EXIT:
            self._flush()

    @rank_zero_only
    def on_rollback(self, trainer: Any, pl_module: Any, from_step: int, to_step: int) -> None:
        """Drop the pending row: its step is trained again."""
        self._row = {}
        self._remember_sent(to_step)

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Pass on the last row, let the other logger end its run, and wait for both."""
        self._pass_on_row()
        if self._logger is not None:
            self._call(lambda logger: logger.finalize(status))
        self._flush()

    def _open(self, step: int, *, logs_config: bool) -> None:
        known = self._read_runs().get(self._key, {})
        arguments = {}
        try:
            if known:
                takes = inspect.signature(self._construct).parameters
                parameter = next((name for name in _ID_PARAMETERS if name in takes), None)
                arguments = {} if parameter is None else {parameter: known["run"]}
            logger: Any = self._construct(**arguments)
            if not isinstance(logger, Logger):
                reason = f"{type(logger).__name__} is no logger of Lightning"
                raise ConfigError(f"{self._key}._target_=…", reason, f"'~{self._key}'")
            experiment = getattr(logger, "experiment", None)  # opens the run
        except ConfigError:
            raise
        except Exception as error:  # of another package, which raises what it likes
            hint = _PIP.search(str(error))
            reason = _describe(error).partition(" HINT: ")[0]
            raise ConfigError(f"{self._key}=…", reason, hint[0] if hint else f"'~{self._key}'") from error
        if getattr(experiment, "disabled", False) is True:  # Comet with online=false, in Lightning 2.6.6
            LOGGER.warning(f"{self._key} records nothing: its {type(experiment).__name__} is disabled")
        self._logger = logger
        self._run = {"run": str(logger.version), "sent": known["sent"] if arguments else 0}
        threading.Thread(target=self._send, args=(logger,), name=self._key, daemon=True).start()
        config_file = self._run_folder / CONFIG_FILE
        # a run that goes on has it; MLflow rejects another value of a setting
        if (logs_config or not arguments) and config_file.is_file():
            config = yaml.safe_load(config_file.read_text(encoding="utf-8"))
            self._call(lambda logger: logger.log_hyperparams(config))
        for row in read_rows(self._run_folder / METRICS_FILE):  # lost in a kill, or not known to a new run
            of_row = int(row.pop("step"))
            if self._run["sent"] < of_row <= step:
                self._pass_on(row, of_row)
        self._remember_sent(step)

    def _read_runs(self) -> dict[str, dict[str, Any]]:
        path = self._run_folder / RUNS_FILE
        runs: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return runs

    def _remember_sent(self, step: int) -> None:
        """Write that the service has every row up to a step, once it has."""

        def write(logger: Logger) -> None:
            self._run["sent"] = step
            with _RUNS_LOCK, tolerating(self._run_folder / RUNS_FILE):
                runs = self._read_runs() | {self._key: self._run}
                write_atomically(self._run_folder / RUNS_FILE, json.dumps(runs, indent=2) + "\n")

        self._call(write)

    def _pass_on_row(self) -> None:
        row, self._row = self._row, {}
        if row:
            if self._logger is None:  # nobody said that the run starts
                self._open(0, logs_config=True)
            self._pass_on(row, self._step)

    def _pass_on(self, row: dict[str, float], step: int) -> None:
        self._call(lambda logger: logger.log_metrics(row, step=step))

    def _call(self, call: Callable[[Logger], object]) -> None:
        self._calls.put(call)

    def _send(self, logger: Logger) -> None:
        """Run in the thread: make one call after the other, until one fails."""
        while True:
            call = self._calls.get()
            if isinstance(call, threading.Event):
                call.set()
            elif not self._has_failed:
                try:
                    call(logger)
                except Exception as error:  # of another package: a service that cannot be reached, a full disk
                    self._has_failed = True
                    LOGGER.error(f"{self._key} gets no further rows: {_describe(error)}; {METRICS_FILE} has every row")

    def _flush(self) -> None:
        """Pass on the last row, and wait until everything is sent."""
        self._pass_on_row()
        if self._logger is None:
            return
        is_sent = threading.Event()
        self._calls.put(is_sent)
        if not is_sent.wait(_FLUSH_SECONDS):
            LOGGER.error(
                f"{self._key} lacks the last rows: they could not be sent in {_FLUSH_SECONDS:.0f} s;"
                f" {METRICS_FILE} has every row"
            )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]
