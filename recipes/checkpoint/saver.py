"""Schedule checkpoints: every N steps or minutes, at the end of training, after a rollback, on a signal."""

import logging
import shutil
import time
from collections.abc import Collection
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from recipes.after_module import AfterModule
from recipes.checkpoint.checkpoint_io import FolderCheckpointIO
from recipes.checkpoint.ending import Ending, Endings
from recipes.checkpoint.layout import split_state
from recipes.checkpoint.retention import (
    ROLLED_BACK,
    Retention,
    apply,
    checkpoint_name,
    clean_up,
    get_manifests,
    point_links,
    rename_after,
)
from recipes.checkpoint.writer import CheckpointWriter, Outcome
from recipes.engine import get_engine
from recipes.errors import ConfigError, shell, type_setting
from recipes.lightning_internals import (
    collect_checkpoint,
    is_accumulating,
    is_ending,
    is_epoch_over,
    list_validated,
    validate_now,
    validates_now,
)
from recipes.optimizer import hold_averages
from recipes.run_folder import CHECKPOINTS
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.signals import WAIT_SECONDS, Preempted, mark_step, requested_by, set_handler
from recipes.runtime.step_agreement import StepAgreement

# Report the outcome of every save, and warn before the first one if the disk is too small.


class SaveError(RuntimeError):
    """A checkpoint could not be written, and `checkpoint.on_save_error=stop`.

    Attributes:
        exit_code: Exit code of the run.
    """

    exit_code = ExitCode.UNSAVED


class SaveLog:
    """Reports each save once: an event, a log line if it failed, an error if the config requests one.

    Args:
        on_save_error: Whether to continue or stop training after a failed save.

    Attributes:
        newest: Outcome of the latest save; None before the first one ends.
    """

    def __init__(self, *, on_save_error: Literal["continue", "stop"]) -> None:
        self.newest: Outcome | None = None
        self._failed: Outcome | None = None
        self._stops = on_save_error == "stop"

    def report(self, trainer: lightning.Trainer, outcome: Outcome | None) -> None:
        """Record the outcome of a save. Call on all ranks at the same point, since it may raise on all of them.

        Raises:
            SaveError: This save or an earlier one failed, and `on_save_error=stop`.
        """
        self.record(trainer, outcome)
        if self._stops and self._failed is not None:
            raise SaveError(
                f"checkpoint.on_save_error=stop: {self._failed.path.name} could not be written: {self._failed.error}"
            )

    def record(self, trainer: lightning.Trainer, outcome: Outcome | None) -> bool:
        """Log the outcome of a save; return whether the run must stop because of it.

        Args:
            trainer: Trainer of the run.
            outcome: Outcome of the save; None if no save has ended.
        """
        if outcome is None:
            return False
        self.newest = outcome
        self._failed = outcome if outcome.error is not None else self._failed
        if trainer.is_global_zero:
            self._log(trainer, outcome)
        return self._stops and outcome.error is not None

    def _log(self, trainer: lightning.Trainer, outcome: Outcome) -> None:
        name = outcome.path.name
        if outcome.is_valid:
            _log_event(
                trainer,
                "checkpoint",
                outcome.step,
                path=name,
                bytes=outcome.bytes,
                seconds=round(outcome.seconds, 3),
                stall_seconds=round(outcome.stall_seconds, 3),
            )
        elif outcome.rejected is not None:
            LOGGER.error(f"Not saved: {name}: {outcome.rejected}. Earlier checkpoints stay")
            _log_event(trainer, "checkpoint_rejected", outcome.step, path=name, why=outcome.rejected)
        else:
            LOGGER.error(f"Could not save {name}: {outcome.error}. Earlier checkpoints stay")
            _log_event(trainer, "checkpoint_failed", outcome.step, path=name, error=outcome.error)


def _log_event(trainer: lightning.Trainer, event: str, step: int, **fields: Any) -> None:
    for logger in trainer.loggers:
        if hasattr(logger, "log_event"):
            logger.log_event(event, step, **fields)


def warn_if_short(trainer: lightning.Trainer, folder: Path, retention: Retention) -> None:
    """Warn if the disk lacks space for the retained checkpoints plus one being written. A collective."""
    size = get_checkpoint_bytes(trainer)
    if not trainer.is_global_zero:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # each save will fail and report this too
        LOGGER.warning(f"Nothing can be saved in {folder}: {error.strerror}")
        return
    most = retention.keep_last + retention.keep_best + 1
    present = sum(manifest.total_bytes for manifest in get_manifests(folder).values())
    needed = max(size * most - present, size)
    free = shutil.disk_usage(folder).free
    if free < needed:
        LOGGER.warning(
            f"Checkpoints take {_gib(size)} GiB each and up to {most} are on the disk at a time, which has"
            f" {_gib(free)} GiB free: {'none' if free < size else 'not all'} of them will fit."
            " Make room, or checkpoint.keep_last=1, or hydra.run.dir=<a folder on a larger disk>"
        )


def get_checkpoint_bytes(trainer: lightning.Trainer) -> int:
    """Return the total size of one checkpoint's tensors over all ranks. A collective."""
    _, _, parts = split_state(collect_checkpoint(trainer), rank=trainer.global_rank)
    # float64 is exact up to 2^53 bytes
    on_rank = torch.tensor(float(sum(part.tensor.nbytes for part in parts.values())), dtype=torch.float64)  # 0-dim
    return int(get_engine(trainer).sum_over_ranks(on_rank))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g}"


LOGGER = logging.getLogger("lightning_recipes")
# requests on which all ranks agree
_STOP, _SAVE, _GIVE_UP = "stop", "save", "give up"
# between two checkpoints of `save_every=auto` of which the second is not the best: a run of short epochs writes few,
# and loses a minute if it is killed
_AUTO_SECONDS = 60.0
_MOST_NAMED = 4  # metrics that a line offers


class CheckpointSaver(AfterModule, Checkpoint):
    """Saves in the background and applies `Retention`.

    A step that is validated is saved after its validation, so that its metrics are in the checkpoint. A signal does
    not wait for that: the resumed run first runs the missed validation.

    Args:
        save_every: Save every N optimizer steps, or with loaders of one's own epochs, as `2epochs`. `auto`: after a
            validation, or an epoch if nothing is validated, that is the best so far or a minute after the last save.
            None disables all of these.
        save_every_minutes: Save every N minutes; None disables time-based saving. With both None nothing is saved.
        keep_last: Number of newest checkpoints to keep.
        keep_every: Keep checkpoints whose step is a multiple of this permanently; None disables it.
        keep_best: Number of best checkpoints to keep.
        monitor: Metric that ranks checkpoints.
        mode: Whether the lowest or the highest metric is best.
        async_save: Whether training continues while a checkpoint is written.
        verify_hashes: Whether to hash every file before loading it.
        on_save_error: Whether to continue or stop training after a failed save.

    Attributes:
        endings: Finds out why the run ends, for its last checkpoint.
        chooses_metric: Whether the one loss that the first validation logs ranks checkpoints: the module is one's own,
            and no metric was typed.
        wait_seconds: Seconds after a signal until a wait for data is given up: most of the time until the kill.
    """

    _agreement: StepAgreement

    def __init__(
        self,
        *,
        save_every: Annotated[int, ">= 1"] | str | None,
        save_every_minutes: Annotated[float, "> 0"] | None,
        keep_last: Annotated[int, ">= 1"],
        keep_every: Annotated[int, ">= 1"] | None,
        keep_best: Annotated[int, ">= 0"],
        monitor: str,
        mode: Literal["min", "max"],
        async_save: bool,
        verify_hashes: bool,
        on_save_error: Literal["continue", "stop"],
    ) -> None:
        self._save_every = save_every
        self._save_every_minutes = save_every_minutes
        self._retention = Retention(
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
            metric=monitor,
            mode=mode,
        )
        self._writer = CheckpointWriter(async_save=async_save, after=lambda folder: apply(self._retention, folder))
        self.checkpoint_io = FolderCheckpointIO(writer=self._writer, verify_hashes=verify_hashes)
        self.save_log = SaveLog(on_save_error=on_save_error)
        self.endings = Endings({}, {})
        self.wait_seconds = WAIT_SECONDS
        self.chooses_metric = False
        self._is_in_window = False  # micro-batches of the next step have changed RNG state and buffers
        self._was_in_window = False  # when an epoch ended after which a checkpoint was due; the next step is saved
        self._stop_is_held = False  # until the end of the accumulation window
        self._saved_step = -1
        self._seen_step = self._step_before = -1
        self._validated_step = -1
        self._validated: set[str] = set()  # names that validation logs
        self._saved_at = 0.0  # monotonic seconds
        self._validation_due = False
        self._save_requested = False  # by the clock
        self._space_checked = False
        self._rolled_back = False  # during the current step
        # steps rolled back: ranks agree on a count of executed steps, which must never decrease
        self._num_rolled_back = 0

    @property
    def saves(self) -> bool:
        """Whether this run writes checkpoints at all."""
        return self._save_every is not None or self._save_every_minutes is not None

    @override
    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        self._saved_step = step
        self._saved_at = time.monotonic()
        if trainer.is_global_zero:
            _clear(self._folder(trainer), step, self._retention)
        self._writer.connect()
        self._agreement = StepAgreement(step=step)
        self._seen_step = self._step_before = step
        alone = trainer.world_size == 1
        saving = " and saved" if self.saves else ", nothing is saved (save_every=null)"
        set_handler(
            lambda: self._agreement.ask(_STOP),
            stop_waiting=(lambda: self._stop_waiting(trainer)) if alone else None,
            wait_seconds=self.wait_seconds,
            announcement=f"Ctrl-C: the step is finished{saving}, then the run stops; Ctrl-C again ends it at once",
        )
        if self._validation_due:
            self._validation_due = False
            self._saved_step = -1  # save the step again, with its validation
            # a callback's hook runs before the module's own, which would restore the RNG after the validation
            pl_module.restore_rng()
            validate_now(trainer)

    @override
    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._stop_is_held and not is_accumulating(trainer):
            # now that this micro-batch completes a step, which is logged as the last one
            self._stop_is_held, trainer.should_stop = False, True

    @override
    def on_before_optimizer_step(self, trainer: lightning.Trainer, pl_module: Any, optimizer: Any) -> None:
        if self._writer.is_copying:
            self._writer.wait_until_copied()

    @override
    def end_batch(self, trainer: lightning.Trainer, pl_module: Any, outputs: Any) -> None:
        step = trainer.global_step
        if step == self._seen_step:  # inside an accumulation window
            # a time limit may end in it; Lightning would validate, save and end here, between two steps
            self._stop_is_held |= trainer.should_stop
            trainer.should_stop = False
            self._is_in_window = True
            self._was_in_window |= self._ends_epochs(trainer)
            return
        self._is_in_window = False
        if self.saves and not self._space_checked:
            # after the first step, which creates the optimizer state, most of the size
            warn_if_short(trainer, self._folder(trainer), self._retention)
            self._space_checked = True
        self._step_before, self._seen_step = self._seen_step, step
        mark_step()
        if self.save_log.record(trainer, self._writer.poll()):
            # the threads of other ranks end slightly later: an exception here would leave them in the next collective
            self._agreement.ask(_GIVE_UP)
        validates = validates_now(trainer)
        total_steps = step + self._num_rolled_back
        due = self._agreement.take_due(total_steps, in_validation=validates, wait=not is_ending(trainer))
        self._act_on(trainer, due, validates=validates)
        if self._rolled_back and self.saves:
            self._save(trainer, step)
        elif not validates:
            self._save_if_due(trainer)
        self._rolled_back = False
        self._watch_clock(trainer)

    def on_rollback(self, trainer: lightning.Trainer, pl_module: Any, from_step: int, to_step: int) -> None:
        """Rename the now obsolete checkpoints after `to_step`, and save the restored state.

        Args:
            trainer: Trainer of the run.
            pl_module: The task.
            from_step: Optimizer steps completed before the rollback.
            to_step: Optimizer steps completed after it.
        """
        # a running save would otherwise appear under its name after the renaming
        if self.save_log.record(trainer, self._writer.poll(wait=True)):
            self._agreement.ask(_GIVE_UP)
        if trainer.is_global_zero:
            try:
                rename_after(self._folder(trainer), to_step, ROLLED_BACK)
                point_links(self._retention, self._folder(trainer))
            except OSError as error:  # reported: the other ranks wait at the barrier
                LOGGER.error(f"Checkpoints after step {to_step} keep their names: {error.strerror}")
        get_engine(trainer).barrier()
        self._seen_step = self._step_before = to_step - 1  # so that `end_batch` handles the current step
        self._saved_step = self._validated_step = -1
        self._rolled_back = True
        self._num_rolled_back += from_step - to_step

    @override
    def on_validation_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._may_stop_in_validation(trainer, in_validation=True)

    @override
    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        # the last chance to stop: collectives follow, which would hang without this rank
        self._may_stop_in_validation(trainer, in_validation=False)

    @override
    def end_validation(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not self._is_in_window:  # as after a short window at the end of an epoch
            self._validated |= list_validated(trainer)
            self._check_metric(trainer)
            self._validated_step = trainer.global_step
            self._save_if_due(trainer)  # now that the metrics of its validation are known

    @override
    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        set_handler(None)
        self._agreement.close()
        self.save_log.report(trainer, self._writer.poll(wait=True))

    @override
    def on_exception(self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Finish a running save, which fails if a required rank is gone."""
        if self._seen_step >= 0:  # training had started
            self._agreement.close()
        self.save_log.record(trainer, self._writer.poll(wait=True))

    @override
    def state_dict(self) -> dict[str, Any]:
        chosen = {"monitor": self._retention.metric} if self.chooses_metric else {}
        return {"validation_due": self._validation_due} | chosen

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validation_due = state_dict["validation_due"]
        if self.chooses_metric and "monitor" in state_dict:  # not if the earlier run was told which
            self._retention = replace(self._retention, metric=state_dict["monitor"])

    def _may_stop_in_validation(self, trainer: lightning.Trainer, *, in_validation: bool) -> None:
        if trainer.state.fn != "fit" or is_ending(trainer) or self._seen_step < 0:
            return
        total_steps = trainer.global_step + self._num_rolled_back
        due = self._agreement.take_due(total_steps, in_validation=in_validation)
        self._act_on(trainer, due, validates=True)

    def _act_on(self, trainer: lightning.Trainer, due: set[str], *, validates: bool) -> None:
        """Act on the requests that all ranks agreed on; each involves collectives, so all ranks must call this."""
        self._save_requested |= _SAVE in due
        if _GIVE_UP in due:
            self.save_log.report(trainer, self._writer.poll(wait=True))
        if _STOP in due and not is_ending(trainer):
            self._stop(trainer, validation_due=validates)

    def _watch_clock(self, trainer: lightning.Trainer) -> None:
        """Request a save by rank 0's clock: with separate clocks, ranks would save at different steps."""
        minutes = self._save_every_minutes
        waited_minutes = (time.monotonic() - self._saved_at) / 60
        if minutes is not None and trainer.is_global_zero and waited_minutes >= minutes:
            self._agreement.ask(_SAVE)

    def _save_if_due(self, trainer: lightning.Trainer) -> None:
        step = trainer.global_step
        if not self.saves or step == self._saved_step:
            return
        every, before = self._save_every, self._step_before
        if every == "auto":
            due = self._is_due_by_itself(trainer)
        elif isinstance(every, str):
            due = self._ends_epochs(trainer)
        else:
            # under manual optimization a batch may make several steps
            due = every is not None and (step % every == 0 or before // every < step // every)
        if self._save_requested or due or self._was_in_window or is_ending(trainer):
            self._save(trainer, step)

    def _ends_epochs(self, trainer: lightning.Trainer) -> bool:
        """Return whether the current micro-batch ends the epochs of `save_every=2epochs`, or of `auto` any."""
        every = self._save_every
        if not isinstance(every, str) or not is_epoch_over(trainer):
            return False
        return every == "auto" or (trainer.current_epoch + 1) % int(every.partition("epoch")[0]) == 0

    def _is_due_by_itself(self, trainer: lightning.Trainer) -> bool:
        """Return whether `save_every=auto` saves a step; the same on all ranks."""
        is_validated = self._validated_step == trainer.global_step
        if not is_validated and (trainer.enable_validation or not is_epoch_over(trainer)):
            return False
        due = time.monotonic() - self._saved_at >= _AUTO_SECONDS
        if not due and is_validated and trainer.is_global_zero:
            on_disk = {saved: manifest.metrics for saved, manifest in get_manifests(self._folder(trainer)).items()}
            due = self._retention.is_best(self._list_metrics(trainer), on_disk)
        # ranks have clocks of their own, and a module may log a metric without averaging it over them
        return get_engine(trainer).broadcast(due)

    def _stop_waiting(self, trainer: lightning.Trainer) -> None:
        """Give up a wait for data of the only rank: in a window, the state of the last completed step is gone."""
        step = trainer.global_step
        if self._is_in_window and step != self._saved_step:
            self._agreement.close()
            self.save_log.report(trainer, self._writer.poll(wait=True))
            raise Preempted(requested_by(), step=step, saved=False)
        self._stop(trainer, validation_due=trainer.validating)

    def _stop(self, trainer: lightning.Trainer, *, validation_due: bool) -> None:
        """Save the current step, wait for the save, and raise `Preempted`."""
        step = trainer.global_step
        if self.saves and step != self._saved_step:
            self._validation_due = validation_due
            self._save(trainer, step, Ending(by=requested_by(), why=f"{requested_by()} stopped it"))
        self._agreement.close()
        self.save_log.report(trainer, self._writer.poll(wait=True))
        newest = self.save_log.newest
        saved = self.saves and step > 0 and (newest is None or newest.is_valid)
        raise Preempted(requested_by(), step=step, saved=saved)

    def _save(self, trainer: lightning.Trainer, step: int, ending: Ending | None = None) -> None:
        # also raises on all ranks, before the collectives of the next save, if the previous one failed on any
        self.save_log.report(trainer, self._writer.poll(wait=True))
        self.checkpoint_io.metrics = self._list_metrics(trainer)
        ending = ending or self.endings.find(trainer)
        self.checkpoint_io.ended = None if ending is None else ending.as_fields()
        # only rank 0 writes batch norm statistics: those of the other ranks would be lost
        task: Any = trainer.lightning_module
        task.share_statistics()
        # a run stopped during validation may have averaged weights swapped in
        hold_averages(trainer.optimizers, task, held=False)
        path = self._folder(trainer) / checkpoint_name(step)
        trainer.save_checkpoint(path, weights_only=False)
        self._saved_step, self._saved_at = step, time.monotonic()
        self._save_requested = self._was_in_window = False

    def _list_metrics(self, trainer: lightning.Trainer) -> dict[str, float]:
        """Return the metrics of the current step.

        A checkpoint must not include the validation of an earlier step: `best` would rank it by the wrong metrics.
        """
        is_validated = self._validated_step == trainer.global_step
        return {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if is_validated or not (name.startswith("val/") or name in self._validated)
        }

    def _check_metric(self, trainer: lightning.Trainer) -> None:
        """Reject a validation metric that the run does not log; for tasks that do not declare their metrics."""
        if not self.saves:  # then none is the best
            return
        metric, known = self._retention.metric, trainer.callback_metrics
        is_of_validation = metric.startswith("val") or "/" not in metric  # not of a callback, as grad/norm
        if self._retention.keep_best and is_of_validation and metric not in known and self.chooses_metric:
            self._choose_metric(list_losses(self._validated.intersection(known)))
        elif self._retention.keep_best and is_of_validation and metric not in known:
            names = sorted(self._validated or {name for name in known if name.startswith("val")}) or ["val/loss"]
            near = (get_close_matches(metric, names, 1) or names)[0]
            mistake = ConfigError(
                f"checkpoint.monitor={metric}",
                f"validation measures {' '.join(names)}, so no checkpoint would ever be the best",
                f"checkpoint.monitor={near}, or checkpoint.keep_best=0",
            )
            mistake.late = "The run has ended after its first validation."
            raise mistake

    def _choose_metric(self, losses: list[str]) -> None:
        """Rank checkpoints by the loss that validation has logged, if it is one; else say that none is the best."""
        if len(losses) == 1:
            self._retention = replace(self._retention, metric=losses[0])
            LOGGER.info(f"The best checkpoint is the one with the lowest {losses[0]}")
        else:
            self._retention = replace(self._retention, keep_best=0)
            names = losses or sorted(self._validated) or ["<a metric that validation logs>"]
            named = " or ".join(type_setting("checkpoint.monitor", name) for name in names[:_MOST_NAMED])
            LOGGER.info(
                f"No checkpoint is the best: validation logs {len(losses) or 'no'} losses; to rank them: {named}"
            )

    @staticmethod
    def _folder(trainer: lightning.Trainer) -> Path:
        return Path(trainer.default_root_dir) / CHECKPOINTS


def list_losses(names: Collection[str]) -> list[str]:
    """Return which of the names that a validation has logged are losses, each once: by step and by epoch it has three.

    Args:
        names: What `list_validated` returns.
    """
    losses = [name for name in names if "loss" in name]
    return sorted(name for name in losses if f"{name}_epoch" not in losses and not name.endswith("_step"))


def _clear(folder: Path, step: int, retention: Retention) -> None:
    """Remove leftovers of a killed run, rename checkpoints after the step that this run resumes from, point the links.

    Raises:
        ConfigError: The folder cannot be changed.
    """
    try:
        clean_up(folder)
        rename_after(folder, step, f"abandoned_{{step:07d}}_{int(time.time())}")
        point_links(retention, folder)
    except OSError as error:
        raise ConfigError(
            f"hydra.run.dir={folder.parent}",
            f"{error.filename or folder} cannot be changed: {error.strerror}",
            f"{shell('chmod -R u+rwX', folder)}, or hydra.run.dir=<another folder>",
        ) from error
