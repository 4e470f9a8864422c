"""What a person and a program read about a spike: a line on the console and an event, on rank 0."""

import logging
import math
from typing import Any

from lightning.pytorch import Trainer

log = logging.getLogger("lightning_recipes")


def log_event(trainer: Trainer, line: str | None, event: str, step: int, **fields: Any) -> None:
    """A line, where there is one, and an event for every logger that takes them."""
    if not trainer.is_global_zero:
        return
    if line is not None:
        log.warning(line)
    for logger in trainer.loggers:
        if hasattr(logger, "log_event"):
            logger.log_event(event, step, **fields)


def finite(value: float) -> float | None:
    """A number as JSON has it, which knows no NaN: None where it is not finite."""
    return value if math.isfinite(value) else None
