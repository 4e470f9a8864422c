"""What becomes of a save that has ended: an event, a line, and an error where the config asks for one."""

import logging
from typing import Any, Literal

import lightning.pytorch as lightning

from recipes.checkpoint.writer import Outcome

LOGGER = logging.getLogger("lightning_recipes")


class SaveError(RuntimeError):
    """A checkpoint could not be written, and `checkpoint.if_save_fails=stop`."""


class FinishedSaves:
    """Tells about every save once.

    Args:
        if_save_fails: Whether training goes on without a checkpoint that could not be written.

    Attributes:
        newest: How the newest save ended; None: none has.
    """

    def __init__(self, *, if_save_fails: Literal["continue", "stop"]) -> None:
        self.newest: Outcome | None = None
        self._failed: Outcome | None = None
        self._stops = if_save_fails == "stop"

    def report(self, trainer: lightning.Trainer, outcome: Outcome | None) -> None:
        """Record how a save ended, where all ranks wait for it.

        Raises:
            SaveError: It or one before could not be written, and training shall not go on without.
        """
        self.record(trainer, outcome)
        if self._stops and self._failed is not None:
            raise SaveError(
                f"checkpoint.if_save_fails=stop: {self._failed.path.name} could not be written: {self._failed.error},"
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
            _log_event(trainer, "checkpoint_refused", outcome.step, path=name, why=outcome.refused)
        else:
            LOGGER.error(f"Could not save {name}: {outcome.error}. What was saved before stays")
            _log_event(trainer, "checkpoint_failed", outcome.step, path=name, error=outcome.error)


def _log_event(trainer: lightning.Trainer, event: str, step: int, **fields: Any) -> None:
    for logger in trainer.loggers:
        if hasattr(logger, "log_event"):
            logger.log_event(event, step, **fields)
