"""Log an event of a run on rank 0: one console line for people, one record for programs."""

import logging
import math
from typing import Any, Literal, TypedDict

from lightning.pytorch import Trainer

log = logging.getLogger("lightning_recipes")


class EventKind(TypedDict, total=False):
    """How readers treat a kind of event; a callback declares its kinds in a class attribute `events`.

    `log_event` writes these fields into the record of each event, so that whoever reads a finished run folder needs
    to know no callback. A kind that nobody declares has the defaults.

    Attributes:
        mark: How charts show it. "line" (default): a vertical line at its step; "span": also shades the steps up to
            its field `from`; "none": not at all, it is in the table of events only.
        kept_on_resume: Whether a resume from an earlier step keeps the record (default False: training repeats that
            step and logs the event again).
    """

    mark: Literal["line", "span", "none"]
    kept_on_resume: bool


def log_event(trainer: Trainer, line: str | None, event: str, step: int, **fields: Any) -> None:
    """Log a console line and hand an event to every logger that has a `log_event` method.

    Args:
        trainer: The run; ranks other than 0 do nothing.
        line: Console line, logged as a warning; None logs none.
        event: Kind of event.
        step: Optimizer steps completed.
        fields: Further plain values of the record.
    """
    if not trainer.is_global_zero:
        return
    if line is not None:
        log.warning(line)
    declared = get_event_kind(trainer, event)
    for logger in trainer.loggers:
        if hasattr(logger, "log_event"):
            logger.log_event(event, step, **fields, **declared)


def get_event_kind(trainer: Trainer, event: str) -> EventKind:
    """Return what the first callback of the run that declares this kind of event says about it."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        kinds: dict[str, EventKind] = getattr(callback, "events", {})
        if event in kinds:
            return kinds[event]
    return {}


def finite(value: float) -> float | None:
    """Return a number as JSON can hold it: None where it is NaN or inf."""
    return value if math.isfinite(value) else None
