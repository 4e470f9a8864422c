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
        self._stops = if_save_fails == "stop"

    def report(self, trainer: lightning.Trainer, outcome: Outcome | None) -> None:
        """Record how a save ended.

        Raises:
            SaveError: It could not be written, and training shall not go on without.
        """
        self.record(trainer, outcome)
        if outcome is not None and outcome.error is not None and self._stops:
            raise SaveError(f"{outcome.path.name} could not be written: {outcome.error}")

    def record(self, trainer: lightning.Trainer, outcome: Outcome | None) -> None:
        """The event and, where there is no checkpoint, the line."""
        if outcome is None:
            return
        self.newest = outcome
        if not trainer.is_global_zero:
            return
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
            LOGGER.error(f"Not saved, {name}: {outcome.refused}; the checkpoint before stays")
            _log_event(trainer, "checkpoint_refused", outcome.step, path=name, why=outcome.refused)
        else:
            LOGGER.error(f"Could not save {name}: {outcome.error}; the checkpoint before stays")
            _log_event(trainer, "checkpoint_failed", outcome.step, path=name, error=outcome.error)


def _log_event(trainer: lightning.Trainer, event: str, step: int, **fields: Any) -> None:
    for logger in trainer.loggers:
        if hasattr(logger, "log_event"):
            logger.log_event(event, step, **fields)
