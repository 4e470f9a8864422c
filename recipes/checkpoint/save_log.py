"""Report the outcome of every save, and warn before the first one if the disk is too small."""

import logging
import shutil
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as lightning
import torch

from recipes.checkpoint.layout import split_state
from recipes.checkpoint.retention import Retention, get_manifests
from recipes.checkpoint.writer import Outcome
from recipes.runtime.exit_codes import ExitCode

LOGGER = logging.getLogger("lightning_recipes")


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
    checkpoint: dict[str, Any] = {
        "state_dict": trainer.strategy.lightning_module_state_dict(),
        "optimizer_states": [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers],
    }
    task = trainer.lightning_module
    task.on_save_checkpoint(checkpoint)
    _, _, parts = split_state(checkpoint, rank=trainer.global_rank)
    # float64 is exact up to 2^53 bytes
    on_rank = torch.tensor(float(sum(part.tensor.nbytes for part in parts.values())), dtype=torch.float64)  # 0-dim
    return int(trainer.strategy.sum_over_ranks(on_rank))  # type: ignore[attr-defined]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g}"
