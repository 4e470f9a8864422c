"""What is done about a step out of line, and when more must be done: skip, roll back, halve the rate, stop. Counts."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Response = Literal["none", "skip", "rollback", "rollback_and_cut", "stop"]


@dataclass(kw_only=True)
class Counts:
    """Of a run, resumes included.

    Attributes:
        clock: Optimizer steps made, those that were rolled back included: it never goes back.
        skipped_steps: Refused before they were made.
        recent_skips: When, on the clock, those of the window were refused.
        rollbacks: In the whole run.
        recent_rollbacks: Each within the cool-down of the one before.
        last_rollback_at: On the clock; None: there was none.
    """

    clock: int = 0
    skipped_steps: int = 0
    recent_skips: list[int] = field(default_factory=list)
    rollbacks: int = 0
    recent_rollbacks: int = 0
    last_rollback_at: int | None = None


class SpikeEscalation:
    """Decides from host numbers alone, so that every rank decides the same.

    Args:
        max_skips: One more within the window, and the run goes back.
        skip_window: In steps.
        cooldown_steps: A rollback within so many steps of the one before is a step up the ladder.
        max_rollbacks: So many, each within the cool-down of the one before, and the run stops.

    Raises:
        ValueError: With no rollback allowed the first spike ends the run.
    """

    def __init__(
        self, *, max_skips: int, skip_window: int, cooldown_steps: int, max_rollbacks: int
    ) -> None:
        if max_rollbacks < 1:
            raise ValueError(
                f"max_rollbacks={max_rollbacks}: the first spike would end the run; type 1 or more"
            )
        self._max_skips = max_skips
        self._skip_window = skip_window
        self._cooldown_steps = cooldown_steps
        self._max_rollbacks = max_rollbacks
        self.counts = Counts()

    def step(self, *, refused: bool, drifts: bool) -> Response:
        """What to do after a step.

        Args:
            refused: Whether it was refused before it was made.
            drifts: Whether the loss has been too high for long.
        """
        counts = self.counts
        counts.clock += 1
        counts.skipped_steps += refused
        since = counts.clock - self._skip_window
        counts.recent_skips = [at for at in counts.recent_skips if at > since]
        counts.recent_skips += [counts.clock] if refused else []
        if drifts or len(counts.recent_skips) > self._max_skips:
            return self._climb()
        return "skip" if refused else "none"

    def _climb(self) -> Response:
        counts = self.counts
        counts.recent_skips = []
        last, counts.last_rollback_at = counts.last_rollback_at, counts.clock
        again = last is not None and counts.clock - last <= self._cooldown_steps
        counts.recent_rollbacks = counts.recent_rollbacks + 1 if again else 1
        if counts.recent_rollbacks > self._max_rollbacks:
            return "stop"
        counts.rollbacks += 1
        return "rollback_and_cut" if again else "rollback"

    @property
    def is_quiet(self) -> bool:
        """Whether no step of the window was refused: a snapshot taken now is of a healthy run."""
        return not self.counts.recent_skips

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self.counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on."""
        self.counts = Counts(**state)
