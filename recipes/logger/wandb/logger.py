"""W&B: one history row per logged optimizer step; config, code, events, samples, alerts and the way the run ended.

Costs a queue entry a step; W&B itself runs behind a thread and in a process of its own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from recipes.logger.wandb.alerts import Alerts
from recipes.logger.wandb.content import (
    code_diff,
    events_table,
    get_names,
    samples_table,
    logged_config,
    validation_table,
)
from recipes.logger.wandb.alerts import WandbExit
from recipes.logger.wandb.resume import STEP
from recipes.logger.wandb.session import WandbSession
from recipes.logger.wandb.init import keep_run_id, open_run, get_run_id
from recipes.logger.wandb.resume import Told
from recipes.run_folder import read_summary
from recipes.run_folder import CHECKPOINTS

# Events that are no marks on the curves. Of any other `event/<name>` is 1 in the row where it happened, unless the
# callback that logs it declares `"mark": "none"`, see `callbacks.events.EventKind`.
UNMARKED_EVENTS = ("start", "resume", "checkpoint", "stop", "preempted", "end")
_START_SECONDS = 60.0  # to import W&B and start its process, beside the wait for the server


class WandbLogger(Logger):
    """Opens its run when training has begun, so that a resume that fails leaves the run it meant as it was.

    Args:
        run_folder: Where config.yaml, environment.json, events.jsonl and summary.json lie, and `wandb` will.
        project: In W&B; None: WANDB_PROJECT, else lightning-recipes.
        entity: In W&B; None: the key's own.
        group: In W&B; None: the recipe and the model, in a sweep the sweep.
        alert_every_minutes: At most one alert of a kind in that time; None: none at all.
        upload_checkpoint: Whether the last checkpoint is uploaded when the run ends.
        init_timeout_seconds: For the server to answer; after it the run is kept offline.
        finish_timeout_seconds: For what is left to be uploaded when the run ends.
    """

    def __init__(
        self,
        *,
        run_folder: Path,
        project: str | None,
        entity: str | None,
        group: str | None,
        alert_every_minutes: float | None,
        upload_checkpoint: bool,
        init_timeout_seconds: float,
        finish_timeout_seconds: float,
    ) -> None:
        super().__init__()
        self._folder = Path(run_folder)
        self._project, self._entity, self._group = project, entity, group
        self._alerts = Alerts(every_minutes=alert_every_minutes)
        self._uploads = upload_checkpoint
        self._init_seconds, self._finish_seconds = init_timeout_seconds, finish_timeout_seconds
        self._session: WandbSession | None = None
        self._is_closed = False
        self._saved_id: str | None = None  # by the checkpoint that this run goes on from
        self._row: dict[str, Any] = {}  # of the newest step, not told yet
        self._marks: dict[str, int] = {}  # of steps that have no row yet
        self._told: Told | None = None  # by the processes before this one
        self._ending = WandbExit()
        self._num_sampled_bytes = 0

    @property
    def name(self) -> str:
        return "wandb"

    @property
    def version(self) -> str | None:
        """The run's id: every checkpoint keeps it."""
        run = self._session.run if self._session is not None else None
        return None if run is None else str(run.id)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """W&B's run; None before training has begun."""
        return None if self._session is None else self._session.run

    @rank_zero_only
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint of this folder knows the run's id, should the folder have lost it."""
        loggers = checkpoint["loggers"]
        is_ours = Path(trainer.ckpt_path).resolve().parents[1] == self._folder.resolve()
        if is_ours and type(self).__name__ in loggers:
            self._saved_id = loggers[type(self).__name__]

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml is told when the run opens."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add to the row of a step, which is told whole when the next one comes."""
        assert step is not None, "Lightning always names the step"
        if self._row and self._row[STEP] != step + 1:
            self._tell_row()
        self._open()
        if not self._row:  # what has happened since the row before
            self._row, self._marks = dict(self._marks), {}
        self._row |= {STEP: step + 1} | {
            name: value for name, value in metrics.items() if name != "epoch"
        }

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Training is over; how the run ended is told by the event that follows."""
        if self._row:  # there will be no other
            self._row |= self._marks
        self._tell_row()

    @rank_zero_only
    def resume_at(self, step: int, *, num_rollbacks: int = 0) -> None:
        """Remember what W&B has been told, before this process opens a file of its own."""
        run_id = get_run_id(self._folder, self._saved_id)
        self._told = Told(self._folder, run_id, resumed_at=step)

    @rank_zero_only
    def on_rollback(self, trainer: Any, pl_module: Any, from_step: int, to_step: int) -> None:
        """Rows of undone steps stay in W&B; those of the steps made anew follow them."""
        self._tell_row()
        self._told = None

    @rank_zero_only
    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """A mark, an alert, the path of a checkpoint, or the end of the run."""
        if event in ("end", "preempted"):
            self._close(event, fields)
            return
        self._open()
        if event not in UNMARKED_EVENTS and fields.get("mark") != "none":
            marks = self._row if self._row and self._row[STEP] == step else self._marks
            marks[f"event/{event}"] = 1
        self._ending.note(event)
        self._alert(event, step, fields)
        if event == "checkpoint":
            path = str(self._folder / CHECKPOINTS / fields["path"])
            self._summarize({"checkpoint": path, "checkpoint_step": step})
            self._tell_samples()

    def _open(self) -> None:
        begun = (self._folder / "config.yaml").is_file()
        if self._session is not None or self._is_closed or not begun:
            return
        run_id = get_run_id(self._folder, self._saved_id)

        def start() -> Any:
            keep_run_id(self._folder, run_id)
            run = open_run(
                self._folder,
                run_id,
                project=self._project,
                entity=self._entity,
                init_timeout_seconds=self._init_seconds,
                finish_timeout_seconds=self._finish_seconds,
                keeps_artifacts=self._uploads,
                **get_names(self._folder, group=self._group),
            )
            if run is not None:
                self._introduce(run)
            return run

        patience = _START_SECONDS + self._init_seconds
        self._session = WandbSession(start, patience_seconds=patience)
        if (told := self._told) is not None:
            self._session.tell(told.log_missed_rows)

    def _introduce(self, run: Any) -> None:
        """What stands before the first row."""
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        run.config.update(logged_config(self._folder, dict(run.config)), allow_val_change=True)
        if self._told is not None and run.resumed:  # only the server knows what has reached it
            self._told.at_the_server(int(run.summary.get(STEP) or 0))
        run.summary.update({"status": "running"})
        if run.offline and (diff := code_diff()):  # online W&B adds it by itself
            (Path(run.dir) / "diff.patch").write_text(diff)
            run.save(str(Path(run.dir) / "diff.patch"), base_path=run.dir, policy="now")

    def _tell_row(self) -> None:
        row, self._row = self._row, {}
        if not row or self._session is None:
            return
        if self._told is not None:
            row = self._told.new_in(row)
        if row:
            self._session.tell(lambda run: run.log(row))

    def _alert(self, event: str, step: int, fields: Mapping[str, Any]) -> None:
        alert = self._alerts.due(event, step, fields)
        if alert is not None and self._session is not None:
            self._session.tell(lambda run: run.alert(**alert))

    def _summarize(self, values: Mapping[str, Any]) -> None:
        if self._session is not None:
            self._session.tell(lambda run: run.summary.update(dict(values)))

    def _tell_samples(self) -> None:
        path = self._folder / "samples.jsonl"
        num_bytes = path.stat().st_size if path.is_file() else 0
        if num_bytes != self._num_sampled_bytes and self._session is not None:
            self._num_sampled_bytes = num_bytes
            folder = self._folder
            self._session.tell(
                lambda run: run.summary.update({"table/samples": samples_table(folder)})
            )

    def _close(self, event: str, fields: Mapping[str, Any]) -> None:
        session, self._is_closed = self._session, True
        if session is None:
            return
        self._tell_row()
        self._tell_samples()
        summary = read_summary(self._folder) or {}
        self._alert(event, 0, fields)
        status, exit_code = self._ending.of(event, fields, summary)
        session.tell(lambda run: run.summary.update(summary | {"status": status}))
        session.tell(self._tell_tables)
        if event == "preempted":
            session.tell(lambda run: run.mark_preempting())
        if self._uploads:
            session.tell(self._upload)
        session.close(exit_code, patience_seconds=self._finish_seconds + _START_SECONDS)
        self._session = None

    def _tell_tables(self, run: Any) -> None:
        for name, table in (("events", events_table), ("validation", validation_table)):
            if (told := table(self._folder)) is not None:
                run.summary.update({f"table/{name}": told})

    def _upload(self, run: Any) -> None:
        import wandb

        newest = self._folder / CHECKPOINTS / "last"
        if newest.exists():
            artifact = wandb.Artifact(f"checkpoint-{run.id}", type="model")
            artifact.add_dir(str(newest.resolve()))
            run.log_artifact(artifact)
