"""When checkpoints are written and which are kept. Training waits for each one."""

import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Checkpoint


class CheckpointSaver(Checkpoint):
    """Saves every so many optimizer steps and where training ends; keeps the newest.

    A step that is validated is saved after its validation, so that no checkpoint is ahead of its own numbers.

    Args:
        save_every: Optimizer steps between checkpoints; None: never save.
        eval_every: Optimizer steps between validations.
        keep_last: How many of the newest stay on disk.
    """

    def __init__(self, *, save_every: int | None, eval_every: int, keep_last: int) -> None:
        self._save_every = save_every
        self._eval_every = eval_every
        self._keep_last = keep_last
        self._saved_step = -1
        self._kept: list[Path] = []

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        folder, step = self._folder(trainer), trainer.global_step
        self._saved_step = step
        present = {int(path.name[5:12]): path for path in sorted(folder.glob("step_*.ckpt"))}
        self._kept = [path for saved, path in present.items() if saved <= step]
        if not trainer.is_global_zero:
            return
        for saved, path in present.items():
            if (
                saved > step
            ):  # of a branch that this resume abandons; kept, under a name nobody resumes from
                path.rename(path.with_name(f"abandoned_{saved:07d}_{int(time.time())}"))

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.should_stop and trainer.global_step % self._eval_every:
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit":
            self._save_if_due(trainer)

    def _save_if_due(self, trainer: lightning.Trainer) -> None:
        step = trainer.global_step
        if self._save_every is None or step == self._saved_step:
            return
        if step % self._save_every == 0 or trainer.should_stop:
            self._save(trainer, step)

    def _save(self, trainer: lightning.Trainer, step: int) -> None:
        began = time.perf_counter()
        path = self._folder(trainer) / f"step_{step:07d}.ckpt"
        trainer.lightning_module.share_statistics()  # type: ignore[operator]
        trainer.save_checkpoint(path, weights_only=False)
        self._saved_step = step
        if not trainer.is_global_zero:
            return
        _point_last(path)
        self._kept = [kept for kept in self._kept if kept != path] + [path]
        while len(self._kept) > self._keep_last:
            trainer.strategy.remove_checkpoint(self._kept.pop(0))
        for logger in trainer.loggers:
            if hasattr(logger, "log_event"):
                seconds = round(time.perf_counter() - began, 3)
                logger.log_event("checkpoint", step, path=path.name, seconds=seconds)

    @staticmethod
    def _folder(trainer: lightning.Trainer) -> Path:
        return Path(trainer.default_root_dir) / "checkpoints"


def _point_last(checkpoint: Path) -> None:
    """Let the link `last` name a checkpoint, by one rename."""
    link = checkpoint.with_name("last")
    fresh = checkpoint.with_name(f"last.tmp-{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(checkpoint.name)
    fresh.replace(link)
