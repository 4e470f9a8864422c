"""When a person is told at once: a spike, a rollback, divergence, memory that ran out. Never a flood."""

import time
from collections.abc import Mapping
from typing import Any


class Alerts:
    """One alert of a kind in so many minutes; those held back are counted in the next.

    Args:
        every_minutes: That many; None: no alerts at all.
    """

    def __init__(self, *, every_minutes: float | None) -> None:
        self._every_minutes = every_minutes
        self._sent_at: dict[str, float] = {}
        self._num_held_back: dict[str, int] = {}

    def due(self, event: str, step: int, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of W&B's `alert`; None: there is nothing to say, or not yet."""
        kind = _kind(event, fields)
        if kind is None or self._every_minutes is None:
            return None
        title, level = kind
        now = time.monotonic()
        if title in self._sent_at and now - self._sent_at[title] < 60 * self._every_minutes:
            self._num_held_back[title] = self._num_held_back.get(title, 0) + 1
            return None
        self._sent_at[title] = now
        num_before = self._num_held_back.pop(title, 0)
        details = [f"{name} {value}" for name, value in fields.items() if value is not None]
        where = [] if event == "end" else [f"step {step}"]
        text = ", ".join([*where, *details])
        if num_before:
            text += f"; {num_before} more since the last alert"
        return {"title": title, "text": text, "level": level}


def _kind(event: str, fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """Title and level."""
    if event == "spike":
        return "Spike", "WARN"
    if event == "rollback":
        return "Rollback", "WARN"
    if event == "stop" or (event == "end" and fields["status"] == "diverged"):
        return "Diverged", "ERROR"
    error = str(fields["error"]) if "error" in fields else ""
    if event == "oom" or "OutOfMemory" in error or "out of memory" in error:
        return "Out of memory", "ERROR"
    return None
