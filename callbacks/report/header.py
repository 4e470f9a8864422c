"""The top of a run's page: what ran, where, how it ended, the numbers one looks for first. No Lightning."""

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from typing import Any

from ..progress.text import TRAIN_LOSS, VAL_LOSS, clock_text
from .html import words
from .run_record import RunRecord, how_it_ended

_STATUS_CLASSES = {
    "finished": "good",
    "preempted": "warn",
    "stopped": "warn",
    "interrupted": "warn",
    "running": "warn",
    "unknown": "warn",
}  # any other: bad


def head(run: RunRecord) -> str:
    """Name, status, when and where it began, and what was typed where there is no list of it."""
    told = ("devices", "hostname") if run.overrides else ("devices", "hostname", "command")
    present = [key for key in told if run.environment.get(key)]
    shown = [*_started(run), *(words(run.environment[key]) for key in present)]
    where = " · ".join(f"<code>{escape(word)}</code>" for word in shown)
    return (
        f'<header><div class="head"><h1>{escape(run.name)}</h1>{status_pill(run)}</div>'
        f'<p class="where">{where}</p></header>'
    )


def status_pill(run: RunRecord) -> str:
    """`finished` in green, and so on; nothing where nothing is known."""
    status = how_it_ended(run)
    if status is None:
        return ""
    return f'<span class="status {status_class(status)}">{escape(status)}</span>'


def status_class(status: str) -> str:
    """Good, a warning, or bad: any that is not known."""
    return _STATUS_CLASSES[status] if status in _STATUS_CLASSES else "bad"


def _started(run: RunRecord) -> list[str]:
    """When the first event was written."""
    seconds = run.events[0].get("time") if run.events else None
    if not isinstance(seconds, (int, float)) or not seconds:
        return []
    return [datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")]


def diagnosis(run: RunRecord) -> str:
    """What a diagnosis found, a line each."""
    found = [e for e in run.events if e.get("event") == "diagnosis" and e.get("text")]
    lines = "".join(
        f"<li><b>step {escape(words(event.get('step')))}</b> {escape(str(event['text']))}</li>"
        for event in found
    )
    return (
        f'<section class="card diagnosis"><h2>Diagnosis</h2><ul>{lines}</ul></section>'
        if lines
        else ""
    )


def tiles(run: RunRecord) -> str:
    """From the summary; before there is one, from the last row."""
    summary = run.summary
    best = _finite(summary.get("best_val_loss"))
    shown = [
        ("train loss", _either(run, "train_loss", TRAIN_LOSS), ""),
        (
            "val loss",
            _either(run, "val_loss", VAL_LOSS),
            "" if best is None else f"best {best:.4g}",
        ),
        ("val accuracy", run.last("val/accuracy"), ""),
        ("tokens/s", _either(run, "tokens_per_second", ("throughput/tokens_per_second",)), ""),
        ("MFU", summary.get("mfu"), ""),
        ("steps", _either(run, "steps", ()) or run.last_step, ""),
        ("tokens", summary.get("tokens"), ""),
        ("time", summary.get("seconds"), ""),
        ("peak memory", summary.get("peak_memory_gib"), "GiB"),
    ]
    items = "".join(
        f'<div class="tile"><dt>{name}</dt><dd>{_tile_value(name, value)}'
        f"{f' <small>{escape(note)}</small>' if note else ''}</dd></div>"
        for name, value, note in shown
        if value is not None
    )
    return f'<dl class="tiles">{items}</dl>'


def _tile_value(name: str, value: Any) -> str:
    number = float(value)
    if not math.isfinite(number):
        return "not finite"
    if name == "time":
        return clock_text(number)
    if name == "MFU":
        return f"{number:.1%}"
    if name == "tokens" and number >= 1e7:
        scale, letter = (1e9, "G") if number >= 1e9 else (1e6, "M")
        return f"{number / scale:.4g} {letter}"
    if name in ("tokens/s", "steps", "tokens"):
        return f"{number:,.0f}"
    return f"{number:.4g}"


def _either(run: RunRecord, key: str, metrics: Iterable[str]) -> Any:
    value = run.summary.get(key)
    if value is not None:
        return value
    return next((last for name in metrics if (last := run.last(name)) is not None), None)


def _finite(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
