"""When checkpoints are written: every so many steps or minutes, where training ends, and when a signal asks."""

import logging
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Checkpoint

from recipes.checkpoint.checkpoint_io import FolderCheckpointIO
from recipes.checkpoint.retention import (
    ROLLED_BACK,
    Retention,
    apply,
    clean_up,
    name_of,
    rename_after,
)
from recipes.checkpoint.save_log import SaveLog, warn_if_short
from recipes.checkpoint.writer import CheckpointWriter
from recipes.lightning_internals import validate_now
from recipes.run_folder import CHECKPOINTS
from recipes.runtime.signals import Preempted, requested_by, set_handler
from recipes.runtime.step_agreement import StepAgreement

LOGGER = logging.getLogger("lightning_recipes")
_STOP, _SAVE, _GIVE_UP = "stop", "save", "give up"


class CheckpointSaver(Checkpoint):
    """Saves behind training and keeps what `Retention` says.

    A step that is validated is saved after its validation, so that no checkpoint is ahead of its own numbers; a
    signal does not wait for that: the validation is made up for when the run goes on.

    Args:
        save_every: Optimizer steps between checkpoints; None: none for that reason.
        save_every_minutes: Minutes between checkpoints; None: none for that reason. Both None: never save.
        eval_every: Optimizer steps between validations.
        keep_last: How many of the newest stay on disk.
        keep_every: Those of multiples of so many steps stay for ever; None: none for that reason.
        keep_best: How many of the best stay.
        best_metric: What they are best by.
        best_mode: Whether less or more of it is better.
        asynchronous: Whether training goes on while a checkpoint is written.
        verify_hashes: Whether every file is hashed before it is loaded.
        on_save_error: Whether training goes on without a checkpoint that could not be written.
    """

    _agreement: StepAgreement

    def __init__(
        self,
        *,
        save_every: int | None,
        save_every_minutes: float | None,
        eval_every: int,
        keep_last: Annotated[int, ">= 1"],
        keep_every: Annotated[int, ">= 1"] | None,
        keep_best: Annotated[int, ">= 0"],
        best_metric: str,
        best_mode: Literal["min", "max"],
        asynchronous: bool,
        verify_hashes: bool,
        on_save_error: Literal["continue", "stop"],
    ) -> None:
        self._save_every = save_every
        self._save_every_minutes = save_every_minutes
        self._eval_every = eval_every
        self._retention = Retention(
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
            metric=best_metric,
            mode=best_mode,
        )
        self._writer = CheckpointWriter(
            asynchronous=asynchronous, after=lambda folder: apply(self._retention, folder)
        )
        self.checkpoint_io = FolderCheckpointIO(writer=self._writer, verify_hashes=verify_hashes)
        self.finished = SaveLog(on_save_error=on_save_error)
        self._saved_step = -1
        self._seen_step = -1
        self._validated_step = -1
        self._saved_at = 0.0
        self._validation_due = False
        self._save_is_asked = False  # by the clock
        self._space_known = False
        self._has_gone_back = False  # in the step under way
        self._num_undone = 0  # steps by rollbacks: ranks agree by a number that never goes back

    @property
    def saves(self) -> bool:
        """Whether this run writes checkpoints at all."""
        return self._save_every is not None or self._save_every_minutes is not None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        self._saved_step = step
        self._saved_at = time.monotonic()
        if trainer.is_global_zero:
            _clear(self._folder(trainer), step)
        self._writer.connect()
        self._agreement = StepAgreement(step=step)
        self._seen_step = step
        set_handler(lambda: self._agreement.ask(_STOP))
        if self._validation_due:
            self._validation_due = False
            self._saved_step = -1  # saved again, with its validation
            pl_module.restore_rng()  # this hook comes before the module's own
            validate_now(trainer)

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: Any, optimizer: Any
    ) -> None:
        self._writer.wait_until_copied()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._seen_step:
            return  # inside an accumulation window
        if self.saves and not self._space_known:
            warn_if_short(trainer, self._folder(trainer), self._retention)
            self._space_known = True
        self._seen_step = step
        if self.finished.record(trainer, self._writer.ended()):
            self._agreement.ask(_GIVE_UP)  # the threads of other ranks end a moment later
        validates = trainer.should_stop or step % self._eval_every == 0
        made = step + self._num_undone
        due = self._agreement.due(made, resting=validates, wait=not trainer.should_stop)
        self._heed(trainer, due, validates=validates)
        if self._has_gone_back and self.saves:
            self._save(trainer, step)
        elif not validates:
            self._save_if_due(trainer)
        self._has_gone_back = False
        self._watch_clock(trainer)

    def on_rollback(
        self, trainer: lightning.Trainer, pl_module: Any, from_step: int, to_step: int
    ) -> None:
        """What was saved after the step gone back to is no checkpoint of this run any more; this state is one."""
        if self.finished.record(trainer, self._writer.ended(wait=True)):
            self._agreement.ask(_GIVE_UP)
        if trainer.is_global_zero:
            try:
                rename_after(self._folder(trainer), to_step, ROLLED_BACK)
            except OSError as error:  # the others wait below
                LOGGER.error(f"Checkpoints after step {to_step} keep their names: {error.strerror}")
        trainer.strategy.barrier()
        self._seen_step = to_step - 1  # the step under way is looked at as any other
        self._saved_step = self._validated_step = -1
        self._has_gone_back = True
        self._num_undone += from_step - to_step

    def on_validation_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._may_stop_in_validation(trainer, resting=True)

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._may_stop_in_validation(
            trainer, resting=False
        )  # from here on the ranks wait for each other

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit":
            self._validated_step = trainer.global_step
            self._save_if_due(trainer)  # now, with its numbers

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        set_handler(None)
        self._agreement.close()
        self.finished.report(trainer, self._writer.ended(wait=True))

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException
    ) -> None:
        """A save under way is brought to its end, unless a rank that it needs is gone."""
        if self._seen_step >= 0:  # training had begun
            self._agreement.close()
        self.finished.record(trainer, self._writer.ended(wait=True))

    def state_dict(self) -> dict[str, Any]:
        return {"validation_due": self._validation_due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validation_due = state_dict["validation_due"]

    def _may_stop_in_validation(self, trainer: lightning.Trainer, *, resting: bool) -> None:
        if trainer.state.fn != "fit" or trainer.should_stop or self._seen_step < 0:
            return
        made = trainer.global_step + self._num_undone
        due = self._agreement.due(made, resting=resting)
        self._heed(trainer, due, validates=True)

    def _heed(self, trainer: lightning.Trainer, due: set[str], *, validates: bool) -> None:
        """Do what all ranks have agreed on."""
        self._save_is_asked |= _SAVE in due
        if _GIVE_UP in due:
            self.finished.report(trainer, self._writer.ended(wait=True))
        if _STOP in due and not trainer.should_stop:
            self._stop(trainer, validation_due=validates)

    def _watch_clock(self, trainer: lightning.Trainer) -> None:
        """Rank 0's clock counts: the others would read another time."""
        minutes = self._save_every_minutes
        waited_minutes = (time.monotonic() - self._saved_at) / 60
        if minutes is not None and trainer.is_global_zero and waited_minutes >= minutes:
            self._agreement.ask(_SAVE)

    def _save_if_due(self, trainer: lightning.Trainer) -> None:
        step = trainer.global_step
        if not self.saves or step == self._saved_step:
            return
        by_steps = self._save_every is not None and step % self._save_every == 0
        if self._save_is_asked or by_steps or trainer.should_stop:
            self._save(trainer, step)

    def _stop(self, trainer: lightning.Trainer, *, validation_due: bool) -> None:
        """Save what there is and leave."""
        step = trainer.global_step
        if self.saves and step != self._saved_step:
            self._validation_due = validation_due
            self._save(trainer, step)
        self._agreement.close()
        self.finished.report(trainer, self._writer.ended(wait=True))
        newest = self.finished.newest
        saved = self.saves and (newest is None or newest.is_whole)
        raise Preempted(requested_by(), step=step, saved=saved)

    def _save(self, trainer: lightning.Trainer, step: int) -> None:
        self.finished.report(trainer, self._writer.ended(wait=True))
        self.checkpoint_io.metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if self._validated_step == step or not name.startswith("val/")
        }
        trainer.lightning_module.share_statistics()  # type: ignore[operator]
        path = self._folder(trainer) / name_of(step)
        trainer.save_checkpoint(path, weights_only=False)
        self._saved_step, self._saved_at = step, time.monotonic()
        self._save_is_asked = False

    @staticmethod
    def _folder(trainer: lightning.Trainer) -> Path:
        return Path(trainer.default_root_dir) / CHECKPOINTS


def _clear(folder: Path, step: int) -> None:
    """Remove what a killed run left half done; checkpoints of a branch that this resume abandons get another name."""
    clean_up(folder)
    rename_after(folder, step, f"abandoned_{{step:07d}}_{int(time.time())}")
