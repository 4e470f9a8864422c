"""Send each row to W&B once, from a background thread. About 10 us per call.

Errors and hangs never affect training. wandb_run.json stores the run's id and the newest row sent, so that a resume
repeats none.
"""

import contextlib
import json
import logging
import netrc
import os
import queue
import secrets
import shlex
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes.errors import ConfigError
from recipes.files import tolerating, write_atomically
from recipes.run_folder import METRICS_FILE, read_json, read_rows

# Open a W&B run online or offline, without a prompt and without a long wait.

DEFAULT_PROJECT = "lightning-recipes"
CODE = Path(__file__).parents[3]
_FLUSH_SECONDS = 1.0  # W&B writes its file this often; its own default, 15 s, is what a kill could lose


def open_run(folder: Path, run_id: str, *, init_timeout_seconds: float, **settings: Any) -> Any:
    """Open a run online if there is a key and the server responds, else offline with a line on how to upload it.

    Args:
        folder: The run folder; W&B keeps its files in `wandb` there.
        run_id: The run's id in W&B.
        init_timeout_seconds: Time for the server to respond.
        settings: Further arguments of `_get_settings`.

    Returns:
        W&B's run; None if WANDB_MODE=disabled.
    """
    import wandb

    # files that wait for their upload belong in the run folder too, not in the home folder
    os.environ.setdefault("WANDB_DATA_DIR", str((folder / "wandb").resolve()))
    user = wandb.setup(settings=wandb.Settings(silent=True)).settings
    if user.mode == "disabled":
        return None
    settings |= {"run_id": run_id, "init_timeout": init_timeout_seconds, "root_dir": str(folder)}
    settings["project"] = settings["project"] or user.project or DEFAULT_PROJECT
    if user.mode in ("offline", "dryrun"):
        reason = "WANDB_MODE=offline"
    elif not _has_key(user):
        reason = "there is no API key"
    else:
        try:
            run = wandb.init(settings=_get_settings(user.mode, **settings))
        except Exception as error:
            reason = first_line(error)
            wandb.teardown(exit_code=1)  # its process still holds the run
        else:
            LOGGER.info(f"W&B: {run.url}")
            return run
    run = wandb.init(settings=_get_settings("offline", **settings))
    files = f"{shlex.quote(str(folder / 'wandb'))}/offline-run-*"
    LOGGER.info(f"W&B: {reason}, so this run is kept offline; to upload it: wandb sync {files}")
    return run


def _get_settings(mode: str, *, finish_timeout_seconds: float, keeps_artifacts: bool, **settings: Any) -> Any:
    """Return W&B's settings, without those that the installed version does not support."""
    import wandb

    settings |= {
        "mode": mode,
        "resume": "allow",
        "silent": True,
        "console": "off",  # train.log has it
        "git_root": str(CODE),  # wherever the run was started from
        "finish_timeout": finish_timeout_seconds,
        "x_transaction_log_flush_interval": _FLUSH_SECONDS,
        # a table is then a file in the run folder, not one in the home folder
        "allow_offline_artifacts": keeps_artifacts,
    }
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in settings.items() if name in known and value is not None})


def _has_key(settings: Any) -> bool:
    """Return whether W&B would find a key for its server without a prompt."""
    if settings.api_key or settings.identity_token_file:
        return True
    netrc_path = os.environ.get("NETRC")
    paths = [Path(netrc_path)] if netrc_path else [Path.home() / ".netrc", Path.home() / "_netrc"]
    host = urllib.parse.urlsplit(settings.base_url).netloc
    for path in paths:
        try:
            if netrc.netrc(str(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


LOGGER = logging.getLogger("lightning_recipes")
ID_FILE = "wandb_run.json"
STEP = "trainer/global_step"
_MAX_WAITING = 10_000  # calls in the queue; beyond that training waits for W&B
_STALL_SECONDS = 30.0  # … and at most this long
_EXIT_SECONDS = 5.0  # for W&B's process to exit


class WandbSession:
    """Executes calls on one run in order until one fails or hangs; later ones are dropped.

    Args:
        start: Opens the run and returns it; None if W&B is disabled.
        timeout_seconds: How long training waits for it.
    """

    def __init__(self, start: Callable[[], Any], *, timeout_seconds: float) -> None:
        self.run: Any = None
        self._has_failed = threading.Event()
        self._waiting: queue.Queue[tuple[Callable[[], None], threading.Event]]
        self._waiting = queue.Queue(maxsize=_MAX_WAITING)
        threading.Thread(target=self._work, name="wandb", daemon=True).start()

        def open_run() -> None:
            self.run = start()

        self._wait(self._enqueue(open_run), timeout_seconds)

    def put(self, call: Callable[[Any], object]) -> None:
        """Queue a call on the run without waiting."""

        def call_run() -> None:
            if self.run is not None:
                call(self.run)

        self._enqueue(call_run)

    def close(self, exit_code: int, *, timeout_seconds: float) -> None:
        """Finish the run and end W&B's process; data not uploaded in time stays on disk."""
        if self.run is not None:
            finished = self._enqueue(lambda: self.run.finish(exit_code=exit_code))
            self._wait(finished, timeout_seconds)
        self._wait(self._enqueue(_teardown), _EXIT_SECONDS)

    def _enqueue(self, call: Callable[[], None]) -> threading.Event:
        """Queue a call; the event is set when it has been executed or dropped."""
        done = threading.Event()
        if self._has_failed.is_set():
            done.set()
            return done
        try:
            self._waiting.put((call, done), timeout=_STALL_SECONDS)
        except queue.Full:
            done.set()
            self._abandon(f"it has accepted nothing for {_STALL_SECONDS:g} s")
        return done

    def _wait(self, done: threading.Event, timeout_seconds: float) -> None:
        if not done.wait(timeout_seconds):
            self._abandon(f"it did not respond within {timeout_seconds:g} s")

    def _work(self) -> None:
        while True:
            call, done = self._waiting.get()
            if not self._has_failed.is_set():
                try:
                    call()
                except (Exception, SystemExit) as error:
                    self._abandon(first_line(error))
            done.set()

    def _abandon(self, reason: str) -> None:
        """Log one line and execute no further calls.

        W&B registers a hook that waits for its process when ours exits, without a limit. `wandb.teardown` removes
        the hook before it waits itself, so it is called on a daemon thread. W&B's process exits when it notices
        that ours is gone.
        """
        if self._has_failed.is_set():
            return
        self._has_failed.set()
        LOGGER.warning(f"W&B is switched off from here on: {reason}; metrics.csv has every row")
        ending = threading.Thread(target=_teardown, name="wandb_teardown", daemon=True)
        ending.start()
        ending.join(_EXIT_SECONDS)


class SentRows:
    """Tracks the rows of a run sent to W&B by this and earlier processes.

    W&B only appends: a second row for a step would be drawn as a second point. So the newest step is written to
    wandb_run.json *before* its rows are sent, and after a resume rows up to that step are skipped, even if they differ.
    A kill can lose about one second of rows in W&B that it had not written to its own file; metrics.csv has them.

    Args:
        folder: The run folder.
        saved_id: The run's id in the checkpoint that the run resumes from; used if wandb_run.json is lost. The rows
            since that checkpoint are then sent again.
        resumed_at: Completed optimizer steps at the resume. None for a new run.
    """

    def __init__(self, folder: Path, saved_id: str | None, *, resumed_at: int | None) -> None:
        self._folder = folder
        self._resumed_at = resumed_at
        path = folder / ID_FILE
        fix = f"rm {path}, and the rows since the checkpoint are sent again"
        record = read_json(path, fix=fix) if path.is_file() else {}
        if type(record.get("step", 0)) is not int or not isinstance(record.get("id", ""), str):
            raise ConfigError(str(path), "its id is not a text, or its step not a whole number", fix)
        # an id in the environment (set by a W&B sweep) takes precedence over the folder's
        kept_id = record.get("id") or saved_id
        self.run_id: str = os.environ.get("WANDB_RUN_ID") or kept_id or secrets.token_hex(4)
        self._step = 0  # the newest step that W&B has
        self._columns: list[str] | None = None  # columns of its row, if a later row may add to them
        if self.run_id == record.get("id"):
            self._step = record.get("step", resumed_at or 0)
            self._columns = record.get("columns")
        elif self.run_id == saved_id:
            self._step = resumed_at or 0
        # of the last row that W&B accepted; None: what wandb_run.json had at the start
        self._accepted: tuple[int | None, None] = (None, None)
        self._is_past = resumed_at is None  # whether every further row is new

    def save(self, step: int | None = None, columns: Iterable[str] | None = None) -> None:
        """Write wandb_run.json. On a full disk it keeps an older step, and a resume may repeat rows.

        Args:
            step: The newest step sent. None keeps the newest step of the processes before this one.
            columns: Metrics in its row, if more metrics of that step may follow. None if none will.
        """
        if step is None:
            step, columns = self._step, self._columns
        columns = None if columns is None else sorted(columns)
        record = {"id": self.run_id, "step": step, "columns": columns}
        with tolerating(self._folder / ID_FILE):
            write_atomically(self._folder / ID_FILE, json.dumps(record) + "\n")

    def set_newest_at_server(self, step: int) -> None:
        """Set the newest step to the last one that reached the server: some sent rows may have been lost."""
        if step != self._step:
            self._step, self._columns = step, None

    def send(self, run: Any, rows: list[dict[str, Any]]) -> None:
        """Send rows to W&B in order, after updating wandb_run.json.

        Raises:
            Exception: W&B failed (for example, its process was killed); wandb_run.json has the last accepted row.
        """
        if not rows:
            return
        step, columns = rows[-1][STEP], set(rows[-1])
        if step == self._step and self._columns is not None:
            columns |= set(self._columns)
        self.save(step, columns)
        for row in rows:
            try:
                run.log(row)
            except Exception:
                self.save(*self._accepted)
                raise
            self._accepted = (row[STEP], None)

    def send_missed(self, run: Any) -> None:
        """Send the rows of metrics.csv that W&B does not have, up to the step of the resume."""
        rows = [{STEP: int(row.pop("step"))} | row for row in read_rows(self._folder / METRICS_FILE)]
        self.send(run, [row for row in rows if self._step < row[STEP] <= (self._resumed_at or 0)])

    def get_unsent(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a row that W&B lacks: all, nothing, or metrics added to its newest row."""
        if self._is_past or row[STEP] > self._step:
            self._is_past = True
            return dict(row)
        if row[STEP] < self._step or self._columns is None:
            return {}
        added = {name: value for name, value in row.items() if name not in self._columns}
        return {STEP: row[STEP]} | added if added else {}

    def skip_nothing(self) -> None:
        """Treat all further rows as new: after a rollback, repeated steps are appended in W&B."""
        self._is_past = True


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its class name if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _teardown() -> None:
    """End W&B's process and remove its exit hook from ours."""
    import wandb

    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()
