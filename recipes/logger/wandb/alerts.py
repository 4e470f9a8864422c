"""When a person is told at once: a spike, a rollback, divergence, memory that ran out. Never a flood."""

import time
from collections.abc import Mapping
from typing import Any
from typing import Any
from collections.abc import Mapping


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


# as in recipes.mode.fit, recipes.entry.run, recipes.entry.out_of_memory and recipes.entry.spawn
_CODES = {"finished": 0, "failed": 1, "diverged": 3, "out_of_memory": 71, "interrupted": 130}


_EXIT_CRASHED = 1


_EXIT_PREEMPTED, _EXIT_TERMINATED, _EXIT_UNSAVED = 75, 143, 74


class WandbExit:
    """Follows the events of a run to its last."""

    def __init__(self) -> None:
        self._newest_save: str | None = None

    def note(self, event: str) -> None:
        """Remember how the newest save of this process went."""
        if event in ("start", "resume"):
            self._newest_save = None  # what was refused before was refused to be loaded
        elif event.startswith("checkpoint"):
            self._newest_save = event

    def of(
        self, event: str, fields: Mapping[str, Any], summary: Mapping[str, Any]
    ) -> tuple[str, int]:
        """Status and exit code of the event that ends the run.

        Args:
            event: `end` or `preempted`.
            fields: Its fields.
            summary: summary.json.
        """
        if event == "preempted":
            return "preempted", _EXIT_PREEMPTED if fields["saved"] else _EXIT_TERMINATED
        status = str(fields["status"])
        if status != "finished":
            return status, _CODES[status] if status in _CODES else _EXIT_CRASHED
        if "train_loss" in summary and summary["train_loss"] is None:
            return "diverged", _CODES["diverged"]
        if self._newest_save == "checkpoint_rejected":
            return "diverged", _CODES["diverged"]
        if self._newest_save == "checkpoint_failed":
            return "unsaved", _EXIT_UNSAVED
        return status, _CODES[status]
