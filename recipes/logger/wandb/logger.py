"""W&B logger: one history row per logged optimizer step; config, code, events, samples, alerts and final status.

Costs at most one queue entry per second; W&B itself runs in a background thread and a separate process.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from recipes.logger.wandb.alerts import Alerts, WandbExit
from recipes.logger.wandb.content import (
    events_table,
    get_code_diff,
    get_logged_config,
    get_names,
    samples_table,
    validation_table,
)
from recipes.logger.wandb.init import open_run
from recipes.logger.wandb.session import STEP, SentRows, WandbSession
from recipes.run_folder import CHECKPOINTS, CONFIG_FILE, SAMPLES_FILE, read_summary

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
        """Add to the row of a step; it is complete when the next step is logged."""
        assert step is not None, "Lightning always passes the step"
        if self._row and self._row[STEP] != step + 1:
            self._complete_row()
        self._open()
        if not self._row:
            self._row, self._marks = dict(self._marks), {}  # events since the last row
        self._row |= {STEP: step + 1} | {name: value for name, value in metrics.items() if name != "epoch"}

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
        for name, get_table in (("events", events_table), ("validation", validation_table)):
            if (table := get_table(self._folder)) is not None:
                run.summary.update({f"table/{name}": table})

    def _upload_checkpoint(self, run: Any) -> None:
        import wandb

        last = self._folder / CHECKPOINTS / "last"
        if last.exists():
            artifact = wandb.Artifact(f"checkpoint-{run.id}", type="model")
            artifact.add_dir(str(last.resolve()))
            run.log_artifact(artifact)
