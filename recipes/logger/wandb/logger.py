"""W&B logger: one history row per logged optimizer step; config, code, events, samples, alerts and final status.

Costs at most one queue entry per second; W&B itself runs in a background thread and a separate process.
"""

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from recipes.logger.wandb.session import CODE, STEP, SentRows, WandbSession, open_run
from recipes.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    read_cells,
    read_config,
    read_environment,
    read_json,
    read_json_lines,
    read_summary,
)
from recipes.runtime.exit_codes import ExitCode

# Events that are not marked on the curves. For all others `event/<name>` is 1 in the row where they happened, unless
# the callback that logs them declares `"mark": "none"`, see `callbacks.events.EventKind`.
UNMARKED_EVENTS = ("start", "resume", "checkpoint", "stop", "preempted", "end")
_START_SECONDS = 60.0  # to import W&B and start its process, in addition to the wait for the server
_SEND_SECONDS = 1.0  # rows are sent in batches, with one write of wandb_run.json each


class WandbLogger(Logger):
    """Opens its run once training has started, so that a failed resume does not touch the run in W&B.

    Args:
        run_folder: Folder with config.yaml, environment.json, events.jsonl and summary.json; `wandb` is created in it.
        project: W&B project. None means WANDB_PROJECT, else lightning-recipes.
        entity: W&B entity. None means the default entity of the API key.
        group: W&B group. None means recipe and model, or the sweep's name.
        alert_every_minutes: Minimum time between alerts of the same kind. None disables alerts.
        upload_checkpoint: Whether to upload the last checkpoint when the run ends.
        init_timeout_seconds: Time for the server to respond; after that the run stays offline.
        finish_timeout_seconds: Time for remaining uploads when the run ends.
    """

    def __init__(
        self,
        *,
        run_folder: Path,
        project: str | None,
        entity: str | None,
        group: str | None,
        alert_every_minutes: Annotated[float, ">= 0"] | None,
        upload_checkpoint: bool,
        init_timeout_seconds: Annotated[float, "> 0"],
        finish_timeout_seconds: Annotated[float, "> 0"],
    ) -> None:
        super().__init__()
        self._folder = Path(run_folder)
        self._project, self._entity, self._group = project, entity, group
        self._alerts = Alerts(every_minutes=alert_every_minutes)
        self._uploads_checkpoint = upload_checkpoint
        self._init_seconds, self._finish_seconds = init_timeout_seconds, finish_timeout_seconds
        self._session: WandbSession | None = None
        self._is_closed = False
        self._saved_id: str | None = None  # in the checkpoint that this run resumes from
        self._row: dict[str, Any] = {}  # row of the newest step, may still grow
        self._marks: dict[str, int] = {}  # for the next row
        self._unsent: list[dict[str, Any]] = []  # complete rows
        self._sent_at = float("-inf")  # time of the last send
        self._sent: SentRows | None = None  # None until the run is opened or resumed
        self._exit = WandbExit()
        self._num_sampled_bytes = 0

    @property
    @override
    def name(self) -> str:
        return "wandb"

    @property
    @override
    def version(self) -> str | None:
        """Return the run's id; Lightning saves it in every checkpoint."""
        run = self._session.run if self._session is not None else None
        return None if run is None else str(run.id)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Return W&B's run; None before training has started."""
        return None if self._session is None else self._session.run

    @rank_zero_only
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read the run's id from a checkpoint of this folder, in case the folder has lost it."""
        ids = checkpoint["loggers"]
        is_ours = Path(trainer.ckpt_path).resolve().parents[1] == self._folder.resolve()
        if is_ours and type(self).__name__ in ids:
            self._saved_id = ids[type(self).__name__]

    @override
    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml is logged when the run opens."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add to the row of a step, without one to the newest; it is complete when the next step is logged."""
        row_step = self._row.get(STEP, 1) if step is None else step + 1
        if self._row and self._row[STEP] != row_step:
            self._complete_row()
        self._open()
        if not self._row:
            self._row, self._marks = dict(self._marks), {}  # events since the last row
        self._row |= {STEP: row_step} | {name: value for name, value in metrics.items() if name != "epoch"}

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Send the last row; the final status follows with the last event."""
        if self._row:
            self._row |= self._marks
        self._send_rows()

    @rank_zero_only
    def resume_at(self, step: int, *, num_rollbacks: int = 0) -> None:
        """Determine which rows W&B already has, before this process sends any.

        Args:
            step: Completed optimizer steps.
            num_rollbacks: Not used.
        """
        self._sent = SentRows(self._folder, self._saved_id, resumed_at=step)

    @rank_zero_only
    def on_rollback(self, trainer: Any, pl_module: Any, from_step: int, to_step: int) -> None:
        """Keep the rolled-back rows, which W&B cannot erase; rows of repeated steps are appended."""
        self._send_rows()
        if self._session is not None and (sent := self._sent) is not None:
            sent.skip_nothing()
            self._session.put(lambda _: sent.save(to_step))

    @rank_zero_only
    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """Log a mark on the curves, an alert, the path of a checkpoint, or the end of the run."""
        if event in ("end", "preempted"):
            self._close(event, fields)
            return
        self._open()
        if event not in UNMARKED_EVENTS and fields.get("mark") != "none":
            marks = self._row if self._row and self._row[STEP] == step else self._marks
            marks[f"event/{event}"] = 1
        self._exit.note(event)
        self._alert(event, step, fields)
        if event == "checkpoint" and self._session is not None:
            path = str(self._folder / CHECKPOINTS / fields["path"])
            values = {"checkpoint": path, "checkpoint_step": step}
            self._session.put(lambda run: run.summary.update(values))
            self._log_samples()

    def _open(self) -> None:
        has_started = (self._folder / CONFIG_FILE).is_file()
        if self._session is not None or self._is_closed or not has_started:
            return
        sent = self._sent or SentRows(self._folder, self._saved_id, resumed_at=None)
        self._sent = sent

        def start() -> Any:
            sent.save()  # the id, also for a resume of a run whose W&B never came up
            run = open_run(
                self._folder,
                sent.run_id,
                project=self._project,
                entity=self._entity,
                init_timeout_seconds=self._init_seconds,
                finish_timeout_seconds=self._finish_seconds,
                keeps_artifacts=self._uploads_checkpoint,
                **get_names(self._folder, group=self._group),
            )
            if run is not None:
                self._log_header(run, sent)
            return run

        timeout = _START_SECONDS + self._init_seconds
        self._session = WandbSession(start, timeout_seconds=timeout)
        self._session.put(sent.send_missed)

    def _log_header(self, run: Any, sent: SentRows) -> None:
        """Log everything that precedes the first row."""
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        config = get_logged_config(self._folder, dict(run.config))
        run.config.update(config, allow_val_change=True)
        if run.resumed:  # only the server knows which rows it received
            sent.set_newest_at_server(int(run.summary.get(STEP) or 0))
        run.summary.update({"status": "running"})
        if run.offline and (diff := get_code_diff()):  # online, W&B adds it itself
            path = Path(run.dir) / "diff.patch"
            path.write_text(diff, encoding="utf-8")
            run.save(str(path), base_path=run.dir, policy="now")

    def _complete_row(self) -> None:
        """Queue the newest row; send the queue if the last send was at least a second ago."""
        row, self._row = self._row, {}
        if row and self._sent is not None:
            row = self._sent.get_unsent(row)
        if row:
            self._unsent.append(row)
        if time.monotonic() - self._sent_at >= _SEND_SECONDS:
            self._hand_over()

    def _send_rows(self) -> None:
        """Send all queued rows, including the newest."""
        self._complete_row()
        self._hand_over()

    def _hand_over(self) -> None:
        rows, self._unsent = self._unsent, []
        if rows and self._session is not None and (sent := self._sent) is not None:
            self._session.put(lambda run: sent.send(run, rows))
            self._sent_at = time.monotonic()

    def _alert(self, event: str, step: int, fields: Mapping[str, Any]) -> None:
        alert = self._alerts.get_due(event, step, fields)
        if alert is not None and self._session is not None:
            self._session.put(lambda run: run.alert(**alert))

    def _log_samples(self) -> None:
        path = self._folder / SAMPLES_FILE
        num_bytes = path.stat().st_size if path.is_file() else 0
        if num_bytes != self._num_sampled_bytes and self._session is not None:
            self._num_sampled_bytes = num_bytes
            self._session.put(lambda run: run.summary.update({"table/samples": samples_table(self._folder)}))

    def _close(self, event: str, fields: Mapping[str, Any]) -> None:
        session, self._is_closed = self._session, True
        if session is None:
            return
        self._send_rows()
        self._log_samples()
        self._alert(event, 0, fields)
        summary = read_summary(self._folder) or {}
        status, exit_code = self._exit.get_status(event, fields, summary)
        session.put(lambda run: run.summary.update(summary | {"status": status}))
        session.put(self._log_tables)
        if event == "preempted":
            session.put(lambda run: run.mark_preempting())
        if self._uploads_checkpoint:
            session.put(self._upload_checkpoint)
        session.close(exit_code, timeout_seconds=self._finish_seconds + _START_SECONDS)
        self._session = None

    def _log_tables(self, run: Any) -> None:
        tables = {"events": events_table, "validation": validation_table, "classes": classes_table}
        for name, get_table in tables.items():
            if (table := get_table(self._folder)) is not None:
                run.summary.update({f"table/{name}": table})

    def _upload_checkpoint(self, run: Any) -> None:
        import wandb

        last = self._folder / CHECKPOINTS / "last"
        if last.exists():
            artifact = wandb.Artifact(f"checkpoint-{run.id}", type="model")
            artifact.add_dir(str(last.resolve()))
            run.log_artifact(artifact)


# W&B alerts (spike, rollback, divergence, out of memory) and the final status of a run.


class Alerts:
    """Sends at most one alert of a kind per interval; suppressed ones are counted in the next.

    Args:
        every_minutes: The interval. None disables alerts.
    """

    def __init__(self, *, every_minutes: float | None) -> None:
        self._every_minutes = every_minutes
        self._sent_at: dict[str, float] = {}
        self._num_held_back: dict[str, int] = {}

    def get_due(self, event: str, step: int, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of W&B's `alert`; None if the event needs none, or one was sent recently."""
        kind = _get_kind(event, fields)
        if kind is None or self._every_minutes is None:
            return None
        title, level = kind
        now = time.monotonic()
        if title in self._sent_at and now - self._sent_at[title] < 60 * self._every_minutes:
            self._num_held_back[title] = self._num_held_back.get(title, 0) + 1
            return None
        self._sent_at[title] = now
        details = [f"{name} {value}" for name, value in fields.items() if value is not None]
        text = ", ".join([*([] if event == "end" else [f"step {step}"]), *details])
        if num_before := self._num_held_back.pop(title, 0):
            text += f"; {num_before} more since the last alert"
        return {"title": title, "text": text, "level": level}


def _get_kind(event: str, fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return title and level of an event's alert; None if it needs none."""
    if event == "spike":
        return "Spike", "WARN"
    if event == "rollback":
        return "Rollback", "WARN"
    if event == "stop" or (event == "end" and fields["status"] == "diverged"):
        return "Diverged", "ERROR"
    error = str(fields["error"]) if "error" in fields else ""
    if event == "oom" or "OutOfMemory" in error or "out of memory" in error:
        return "Out of memory", "ERROR"
    return None


_EXIT_CODES = {
    "finished": ExitCode.FINISHED,
    "diverged": ExitCode.DIVERGED,
    "out_of_memory": ExitCode.OUT_OF_MEMORY,
    "interrupted": ExitCode.INTERRUPTED,
}


class WandbExit:
    """Determines a run's final status and exit code, which W&B needs before the process exits."""

    def __init__(self) -> None:
        self._last_save: str | None = None

    def note(self, event: str) -> None:
        """Record the outcome of this process's latest save."""
        if event in ("start", "resume"):
            self._last_save = None  # an earlier rejection was of a checkpoint to load
        elif event.startswith("checkpoint"):
            self._last_save = event

    def get_status(self, event: str, fields: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[str, ExitCode]:
        """Return status and exit code for the event that ends the run.

        Args:
            event: `end` or `preempted`.
            fields: The event's fields.
            summary: The content of summary.json.
        """
        if event == "preempted":
            unsaved = ExitCode.INTERRUPTED if fields["signal"] == "SIGINT" else ExitCode.TERMINATED
            return "preempted", ExitCode.PREEMPTED if fields["saved"] else unsaved
        status = str(fields["status"])
        if status == "finished":
            if summary.get("status") == "diverged" or self._last_save == "checkpoint_rejected":
                status = "diverged"
            elif self._last_save == "checkpoint_failed":
                return "unsaved", ExitCode.UNSAVED
        return status, _EXIT_CODES.get(status, ExitCode.CRASHED)


# Names, config, code and tables of a W&B run, read from the run folder.

SWEEP_FOLDER_PREFIX = "wandb_"  # set by recipes.config.compose
_MAX_TABLE_ROWS = 2000  # the newest
_MAX_TAG_LENGTH = 64  # W&B rejects longer ones


def get_names(folder: Path, *, group: str | None) -> dict[str, Any]:
    """Return name, group and tags of a run, from its recipe, model and sweep."""
    config, environment = read_config(folder), read_environment(folder)
    overrides = dict(text.split("=", 1) for text in environment["overrides"] if "=" in text)
    recipe = overrides.get("recipe", str(config["name"]))
    model = overrides.get("model", _get_class_name(config["model"]))
    kind = f"{recipe}_{model}"
    sweep = _get_sweep(folder)
    where = f"{sweep}_{folder.name}" if sweep is not None else folder.name
    tags = [recipe, model, _get_class_name(config["strategy"]), *map(str, config["tags"])]
    if sweep is not None:
        tags.append("sweep")
    return {
        "run_name": f"{kind}_{where}",
        "run_group": group or (f"sweep_{sweep}" if sweep is not None else kind),
        "run_job_type": "train",
        "run_tags": tuple(tag[:_MAX_TAG_LENGTH] for tag in dict.fromkeys(tags) if tag),
    }


def get_logged_config(folder: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved, nested config, with the run's environment as `environment`.

    Args:
        folder: The run folder.
        known: The config that W&B already has. In a W&B sweep it holds a varied group as the name of its option
            (`model: gpt2_nano`); the settings of that group are then logged as `model_settings`.
    """
    config = read_config(folder) | {"environment": read_environment(folder)}
    options = {name for name, value in known.items() if isinstance(value, str)}
    return {
        f"{name}_settings" if name in options and isinstance(value, dict) else name: value
        for name, value in config.items()
    }


def get_code_diff() -> str:
    """Return the uncommitted changes of the code; empty outside a repository or without git."""
    try:
        done = subprocess.run(["git", "--no-optional-locks", "diff", "HEAD"], cwd=CODE, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.decode(errors="replace")


def events_table(folder: Path) -> Any:
    """Return a table of all events of the run, earlier processes included; None if there are none."""
    return _table(
        folder / EVENTS_FILE,
        ["step", "event", "time", "details"],
        lambda line: [
            line["step"],
            line["event"],
            line.get("time"),
            json.dumps({k: v for k, v in line.items() if k not in ("step", "event", "time")}),
        ],
    )


def samples_table(folder: Path) -> Any:
    """Return a table of the texts that the model generated; None if there are none."""
    return _table(
        folder / SAMPLES_FILE,
        ["step", "prompt", "text"],
        lambda line: [line["step"], line["prompt"], line["text"]],
    )


def validation_table(folder: Path) -> Any:
    """Return a table with one row per validation and one column per metric; None if there was none."""
    import wandb

    rows = read_cells(folder / METRICS_FILE)
    columns = [name for name in rows[0] if name.startswith("val/")] if rows else []
    validations = [row for row in rows if any(row[name] for name in columns)][-_MAX_TABLE_ROWS:]
    if not validations:
        return None
    data = [[int(row["step"]), *(float(row[name]) if row[name] else None for name in columns)] for row in validations]
    return wandb.Table(columns=["step", *columns], data=data)


def classes_table(folder: Path) -> Any:
    """Return a table of a classifier's last validation: a row per class and prediction; None if it has no classes."""
    import wandb

    path = folder / "classes_val.json"
    if not path.is_file():
        return None
    record = read_json(path, fix="another run")
    given = record["class_names"] or []
    names = [*given, *map(str, range(len(given), len(record["samples"])))]
    right = [[number, number, count] for number, count in enumerate(record["right"]) if count]
    rows = [[names[target], names[predicted], count] for target, predicted, count in [*right, *record["pairs"]]]
    return wandb.Table(columns=["class", "predicted", "samples"], data=rows[:_MAX_TABLE_ROWS])


def _table(path: Path, columns: list[str], get_row: Callable[[dict[str, Any]], list[Any]]) -> Any:
    import wandb

    if not path.is_file():
        return None
    lines = read_json_lines(path)[-_MAX_TABLE_ROWS:]
    return wandb.Table(columns=columns, data=[get_row(line) for line in lines])


def _get_sweep(folder: Path) -> str | None:
    """Return the name of the Hydra or W&B sweep that contains the run folder; None if there is none."""
    parent = folder.resolve().parent
    if (parent / "multirun.yaml").is_file():
        return parent.name
    is_wandb_sweep = parent.name.startswith(SWEEP_FOLDER_PREFIX)
    return parent.name.removeprefix(SWEEP_FOLDER_PREFIX) if is_wandb_sweep else None


def _get_class_name(node: Mapping[str, Any]) -> str:
    """Return the name of the class that a config node builds."""
    return str(node["_target_"]).rpartition(".")[2]
