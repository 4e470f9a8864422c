"""Log what was decided about a step out of line: the console line and the event."""

import math

from lightning.pytorch import Trainer

from ..events import finite, log_event
from .escalation import Response
from .monitor import Verdict

_WORDS = {"loss": "loss", "norm": "gradient norm"}


def log_verdict(trainer: Trainer, verdict: Verdict, response: Response) -> None:
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
        log_event(
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
        log_event(trainer, line if response == "skip" else None, "skip", step)
