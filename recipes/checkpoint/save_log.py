"""What becomes of a save that has ended: an event, a line, and an error where the config asks for one."""

import logging
import shutil
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as lightning
import torch

from recipes.checkpoint.layout import split_state
from recipes.checkpoint.retention import Retention, manifests
from recipes.checkpoint.shard_file import Part
from recipes.checkpoint.writer import Outcome

LOGGER = logging.getLogger("lightning_recipes")


class SaveError(RuntimeError):
    """A checkpoint could not be written, and `checkpoint.on_save_error=stop`."""


class SaveLog:
    """Tells about every save once.

    Args:
        on_save_error: Whether training goes on without a checkpoint that could not be written.

    Attributes:
        newest: How the newest save ended; None: none has.
    """

    def __init__(self, *, on_save_error: Literal["continue", "stop"]) -> None:
        self.newest: Outcome | None = None
        self._failed: Outcome | None = None
        self._stops = on_save_error == "stop"

    def report(self, trainer: lightning.Trainer, outcome: Outcome | None) -> None:
        """Record how a save ended, where all ranks wait for it.

        Raises:
            SaveError: It or one before could not be written, and training shall not go on without.
        """
        self.record(trainer, outcome)
        if self._stops and self._failed is not None:
            raise SaveError(
                f"checkpoint.on_save_error=stop: {self._failed.path.name} could not be written: {self._failed.error},"
                " then resume=<the run's folder>"
            )

    def record(self, trainer: lightning.Trainer, outcome: Outcome | None) -> bool:
        """The event and, where there is no checkpoint, the line; whether the run is to end for it."""
        if outcome is None:
            return False
        self.newest = outcome
        self._failed = outcome if outcome.error is not None else self._failed
        if trainer.is_global_zero:
            self._tell(trainer, outcome)
        return self._stops and outcome.error is not None

    def _tell(self, trainer: lightning.Trainer, outcome: Outcome) -> None:
        name = outcome.path.name
        if outcome.is_whole:
            _log_event(
                trainer,
                "checkpoint",
                outcome.step,
                path=name,
                bytes=outcome.bytes,
                seconds=round(outcome.seconds, 3),
                stall_seconds=round(outcome.stall_seconds, 3),
            )
        elif outcome.refused is not None:
            LOGGER.error(f"Not saved, {name}: {outcome.refused}; what was saved before stays")
            _log_event(trainer, "checkpoint_rejected", outcome.step, path=name, why=outcome.refused)
        else:
            LOGGER.error(f"Could not save {name}: {outcome.error}. What was saved before stays")
            _log_event(trainer, "checkpoint_failed", outcome.step, path=name, error=outcome.error)


def _log_event(trainer: lightning.Trainer, event: str, step: int, **fields: Any) -> None:
    for logger in trainer.loggers:
        if hasattr(logger, "log_event"):
            logger.log_event(event, step, **fields)


LOGGER = logging.getLogger("lightning_recipes")


def warn_if_short(trainer: lightning.Trainer, folder: Path, retention: Retention) -> None:
    """One line where the free disk is less than what will be kept, and one more while it is written. A collective."""
    one = checkpoint_bytes(trainer)
    if not trainer.is_global_zero:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # each save will say so as well
        LOGGER.warning(f"Nothing can be saved in {folder}: {error.strerror}")
        return
    kept = retention.keep_last + retention.keep_best + 1
    needed = max(one * kept - sum(m.total_bytes for m in manifests(folder).values()), one)
    free = shutil.disk_usage(folder).free
    if free < needed:
        LOGGER.warning(
            f"Checkpoints take {_gib(one)} GiB each and up to {kept} lie on the disk at a time, which has"
            f" {_gib(free)} GiB free: {'none' if free < one else 'not all'} of them will fit."
            " Make room, or checkpoint.keep_last=1, or hydra.run.dir=<a folder on a larger disk>"
        )


def checkpoint_bytes(trainer: lightning.Trainer) -> int:
    """Of the tensors of one checkpoint, over all ranks. A collective."""
    checkpoint: dict[str, Any] = {
        "state_dict": trainer.strategy.lightning_module_state_dict(),
        "optimizer_states": [
            trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers
        ],
    }
    task = trainer.lightning_module
    task.on_save_checkpoint(checkpoint)
    _, parts = split_state(checkpoint, rank=trainer.global_rank)
    mine = torch.tensor(float(sum(_bytes(part) for part in parts.values())), dtype=torch.float64)
    return int(trainer.strategy.sum_over_ranks(mine))  # type: ignore[attr-defined]


def _bytes(part: Part) -> int:
    return part.tensor.numel() * part.tensor.element_size()


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g}"
