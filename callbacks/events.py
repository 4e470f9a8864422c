"""Log events of a run on rank 0, as a console line and as a structured record."""

import logging
import math
from typing import Any, Literal, TypedDict

from lightning.pytorch import Trainer

from .lightning_internals import get_callbacks

log = logging.getLogger("lightning_recipes")


class EventKind(TypedDict, total=False):
    """How readers treat a kind of event; a callback declares its kinds in a class attribute `events`.

    `log_event` writes these fields into each event's record, so that programs that read a finished run folder need
    not know the callbacks. Undeclared kinds use the defaults.

    Attributes:
        mark: How charts show the event. "line" (default): a vertical line at its step; "span": also shade the steps up
            to its field `from`; "none": not shown, only listed in the table of events.
        kept_on_resume: Whether a resume from an earlier step keeps the record (default False: training repeats that
            step and logs the event again).
    """

    mark: Literal["line", "span", "none"]
    kept_on_resume: bool


def log_event(trainer: Trainer, line: str | None, event: str, step: int, **fields: Any) -> None:
    """Log a console line, and pass the event to whoever keeps events; rank 0 only.

    These are the loggers with a `log_event` method, and the callbacks with a `receive_event` method, such as RunReport.

    Args:
        trainer: The trainer.
        line: Console line, logged as a warning; None logs none.
        event: Kind of event.
        step: Optimizer steps completed.
        fields: Additional plain values for the record.
    """
    if not trainer.is_global_zero:
        return
    if line is not None:
        log.warning(line)
    declared = get_event_kind(trainer, event)
    for logger in trainer.loggers:
        if hasattr(logger, "log_event"):
            logger.log_event(event, step, **fields, **declared)
    for callback in get_callbacks(trainer):
        if hasattr(callback, "receive_event"):
            callback.receive_event(event, step, **fields, **declared)


def get_event_kind(trainer: Trainer, event: str) -> EventKind:
    """Return the declaration of a kind of event by the first callback that has one; empty if none has."""
    for callback in get_callbacks(trainer):
        kinds: dict[str, EventKind] = getattr(callback, "events", {})
        if event in kinds:
            return kinds[event]
    return {}


def finite(value: float) -> float | None:
    """Return a number as a JSON value: None if it is NaN or inf."""
    return value if math.isfinite(value) else None
