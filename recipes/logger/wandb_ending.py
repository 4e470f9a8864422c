"""How a run ended, as W&B has it: a status and the exit code that the process ends with. A few words."""

from collections.abc import Mapping
from typing import Any

# as in recipes.mode.fit, recipes.launch, recipes.out_of_memory and recipes.start_ranks
_CODES = {"finished": 0, "failed": 1, "diverged": 3, "out_of_memory": 71, "interrupted": 130}
_EXIT_CRASHED = 1
_EXIT_PREEMPTED, _EXIT_TERMINATED, _EXIT_UNSAVED = 75, 143, 74


class Ending:
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
        if self._newest_save == "checkpoint_refused":
            return "diverged", _CODES["diverged"]
        if self._newest_save == "checkpoint_failed":
            return "unsaved", _EXIT_UNSAVED
        return status, _CODES[status]
