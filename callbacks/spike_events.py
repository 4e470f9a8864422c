"""What a person and a program read about a spike: a line on the console and an event, on rank 0."""

import logging
import math
from typing import Any

from lightning.pytorch import Trainer

from callbacks.spike_ladder import Response
from callbacks.spike_watch import Verdict

log = logging.getLogger("lightning_recipes")
_WORDS = {"loss": "loss", "norm": "gradient norm"}


def tell_verdict(trainer: Trainer, verdict: Verdict, response: Response) -> None:
    """Everything that is out of line about a step."""
    step = verdict.reading.step
    for series, alarm in verdict.alarms.items():
        line = f"Step {step}: {_WORDS[series]} {alarm.value:.4g}"
        if alarm.kind == "drift":
            line = f"Step {step}: the {_WORDS[series]} has risen to {alarm.value:.4g}"
        if not math.isnan(alarm.expected):
            line += f", expected {alarm.expected:.4g}"
        if math.isfinite(alarm.score):
            line += f", {alarm.score:.0f} standard deviations above"
        tell(
            trainer,
            line,
            "spike",
            step,
            series=series,
            kind=alarm.kind,
            value=finite(alarm.value),
            expected=finite(alarm.expected),
            score=finite(alarm.score),
        )
    if verdict.refused:
        line = f"Step {step}: skipped; weights and moments are as before"
        tell(trainer, line if response == "skip" else None, "skip", step)


def tell(trainer: Trainer, line: str | None, event: str, step: int, **fields: Any) -> None:
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
