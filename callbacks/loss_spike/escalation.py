"""Decide what to do after each step: skip, roll back, also back off the learning rate, stop. Counts, no torch."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Response = Literal["none", "skip", "rollback", "rollback_and_backoff", "stop"]


@dataclass(kw_only=True)
class Counts:
    """What has happened in a run, resumes included.

    Attributes:
        clock: Optimizer steps executed, later rolled back or not: it never decreases.
        skipped_steps: Steps whose update was skipped.
        recent_skips: Clock values of the skips within the window.
        rollbacks: In the whole run.
        recent_rollbacks: Rollbacks in a row, each within the cooldown of the previous one.
        last_rollback_at: Clock value; None before the first.
    """

    clock: int = 0
    skipped_steps: int = 0
    recent_skips: list[int] = field(default_factory=list)
    rollbacks: int = 0
    recent_rollbacks: int = 0
    last_rollback_at: int | None = None


class SpikeEscalation:
    """Decides from host values alone, so that every rank decides the same.

    Args:
        max_skips: Skips within the window before the run rolls back at the next one.
        skip_window: In optimizer steps.
        cooldown_steps: A rollback within this many optimizer steps of the previous one escalates to the next level.
        max_rollbacks: Rollbacks in a row, each within the cooldown of the previous one, before the run stops.

    Raises:
        ValueError: `max_rollbacks` is below 1: the first spike would end the run.
    """

    def __init__(self, *, max_skips: int, skip_window: int, cooldown_steps: int, max_rollbacks: int) -> None:
        if max_rollbacks < 1:
            raise ValueError(f"max_rollbacks={max_rollbacks}: the first spike would end the run; type 1 or more")
        self._max_skips = max_skips
        self._skip_window = skip_window
        self._cooldown_steps = cooldown_steps
        self._max_rollbacks = max_rollbacks
        self.counts = Counts()

    def step(self, *, skipped: bool, drifts: bool) -> Response:
        """Count a step and return what to do about it.

        Args:
            skipped: Whether its update was skipped.
            drifts: Whether the loss has been too high for long.
        """
        counts = self.counts
        counts.clock += 1
        counts.skipped_steps += skipped
        since = counts.clock - self._skip_window
        counts.recent_skips = [at for at in counts.recent_skips if at > since]
        counts.recent_skips += [counts.clock] if skipped else []
        if drifts or len(counts.recent_skips) > self._max_skips:
            return self._escalate()
        return "skip" if skipped else "none"

    def _escalate(self) -> Response:
        counts = self.counts
        counts.recent_skips = []
        last, counts.last_rollback_at = counts.last_rollback_at, counts.clock
        in_cooldown = last is not None and counts.clock - last <= self._cooldown_steps
        counts.recent_rollbacks = counts.recent_rollbacks + 1 if in_cooldown else 1
        if counts.recent_rollbacks > self._max_rollbacks:
            return "stop"
        counts.rollbacks += 1
        return "rollback_and_backoff" if in_cooldown else "rollback"

    @property
    def is_quiet(self) -> bool:
        """Whether no step of the window was skipped: a snapshot taken now is of a healthy run."""
        return not self.counts.recent_skips

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return asdict(self.counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.counts = Counts(**state)
