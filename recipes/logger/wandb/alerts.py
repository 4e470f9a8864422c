"""W&B alerts (spike, rollback, divergence, out of memory) and the final status of a run."""

import time
from collections.abc import Mapping
from typing import Any

from recipes.runtime.exit_codes import ExitCode


class Alerts:
    """Sends at most one alert of a kind per interval; suppressed ones are counted in the next.

    Args:
        every_minutes: The interval. None disables alerts.
    """

    def __init__(self, *, every_minutes: float | None) -> None:
        self._every_minutes = every_minutes
        self._sent_at: dict[str, float] = {}
        self._num_held_back: dict[str, int] = {}

    def get_due(self, event: str, step: int, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of W&B's `alert`; None if the event needs none, or one was sent recently."""
        kind = _get_kind(event, fields)
        if kind is None or self._every_minutes is None:
            return None
        title, level = kind
        now = time.monotonic()
        if title in self._sent_at and now - self._sent_at[title] < 60 * self._every_minutes:
            self._num_held_back[title] = self._num_held_back.get(title, 0) + 1
            return None
        self._sent_at[title] = now
        details = [f"{name} {value}" for name, value in fields.items() if value is not None]
        text = ", ".join([*([] if event == "end" else [f"step {step}"]), *details])
        if num_before := self._num_held_back.pop(title, 0):
            text += f"; {num_before} more since the last alert"
        return {"title": title, "text": text, "level": level}


def _get_kind(event: str, fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return title and level of an event's alert; None if it needs none."""
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


_EXIT_CODES = {
    "finished": ExitCode.FINISHED,
    "diverged": ExitCode.DIVERGED,
    "out_of_memory": ExitCode.OUT_OF_MEMORY,
    "interrupted": ExitCode.INTERRUPTED,
}


class WandbExit:
    """Determines a run's final status and exit code, which W&B needs before the process exits."""

    def __init__(self) -> None:
        self._last_save: str | None = None

    def note(self, event: str) -> None:
        """Record the outcome of this process's latest save."""
        if event in ("start", "resume"):
            self._last_save = None  # an earlier rejection was of a checkpoint to load
        elif event.startswith("checkpoint"):
            self._last_save = event

    def get_status(self, event: str, fields: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[str, ExitCode]:
        """Return status and exit code for the event that ends the run.

        Args:
            event: `end` or `preempted`.
            fields: The event's fields.
            summary: The content of summary.json.
        """
        if event == "preempted":
            return "preempted", ExitCode.PREEMPTED if fields["saved"] else ExitCode.TERMINATED
        status = str(fields["status"])
        if status == "finished":
            if summary.get("status") == "diverged" or self._last_save == "checkpoint_rejected":
                status = "diverged"
            elif self._last_save == "checkpoint_failed":
                return "unsaved", ExitCode.UNSAVED
        return status, _EXIT_CODES.get(status, ExitCode.CRASHED)
