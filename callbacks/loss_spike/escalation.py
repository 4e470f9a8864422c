"""Decide how to respond to a step: skip, roll back, back off the learning rate, or stop. Only counts, no torch."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .detector import LEVEL_STEPS

Action = Literal["warn", "skip", "repair", "rollback"]
Response = Literal["none", "skip", "relearn", "rollback", "rollback_and_backoff", "stop"]


@dataclass(kw_only=True)
class Counts:
    """Counts of spikes and rollbacks in a run, kept across resumes.

    Attributes:
        clock: Optimizer steps executed, including rolled-back ones: it never decreases.
        skipped_steps: Steps whose update was skipped.
        recent_outliers: Clock values of the finite outliers within the window.
        non_finite_in_row: Consecutive steps with NaN or inf.
        overflows_in_row: Consecutive steps with a NaN or inf loss that a loss scaler skipped by lowering its scale.
        rollbacks: Rollbacks in the whole run.
        recent_rollbacks: Consecutive rollbacks, each within the cooldown of the previous one.
        last_rollback_at: Clock value of the last rollback; None before the first.
    """

    clock: int = 0
    skipped_steps: int = 0
    recent_outliers: list[int] = field(default_factory=list)
    non_finite_in_row: int = 0
    overflows_in_row: int = 0
    rollbacks: int = 0
    recent_rollbacks: int = 0
    last_rollback_at: int | None = None


class SpikeEscalation:
    """Decides the response to each step, from host values alone so that all ranks decide the same.

    A non-finite step is skipped before it is applied, so it does no damage; many in a row, whatever the batch, indicate
    damaged weights. So do many outliers within a window, even if the loss looks normal in between; a single outlier
    is attributed to the data. The response to damage is a rollback. A step that a loss scaler skips is neither, as long
    as the scaler can still lower its scale.

    Args:
        action: Strongest response to outliers. `warn` and `skip` do not roll back: if outliers continue, the new level
            of the loss is learned (`relearn`) instead of skipping indefinitely. `repair` only rolls back drifts; it
            learns the level of one that follows a rollback at once, or after `max_rollbacks`.
        max_skips: Outliers tolerated within the window; the next one rolls back, or relearns the normal level.
        max_non_finite: Consecutive non-finite steps tolerated; the next one rolls back, or stops the run.
        window_steps: Window in optimizer steps; a snapshot may be taken only if it contains no outlier.
        cooldown_steps: A rollback within this many optimizer steps of the previous one escalates to the next level.
        max_rollbacks: Consecutive rollbacks, each within the cooldown of the previous one, before the run stops.

    Raises:
        ValueError: `max_rollbacks` is below 1: the first spike would end the run.
    """

    def __init__(
        self,
        *,
        action: Action,
        max_skips: int,
        max_non_finite: int,
        window_steps: int,
        cooldown_steps: int,
        max_rollbacks: int,
    ) -> None:
        if max_rollbacks < 1:
            raise ValueError(f"max_rollbacks={max_rollbacks}: the first spike would end the run; type 1 or more")
        self._action = action
        self._max_skips = max_skips
        self._max_non_finite = max_non_finite
        self._window_steps = window_steps
        self._cooldown_steps = cooldown_steps
        self._max_rollbacks = max_rollbacks
        self.counts = Counts()

    def step(
        self,
        *,
        skipped: bool,
        outlier: bool = False,
        non_finite: bool = False,
        overflowed: bool = False,
        drifts: bool = False,
    ) -> Response:
        """Count a step and return the response.

        Args:
            skipped: Whether its update was skipped.
            outlier: Whether its loss or norm was a finite spike.
            non_finite: Whether its loss or norm was NaN or inf; takes precedence.
            overflowed: Whether its loss was NaN or inf and a loss scaler skipped it by lowering its scale; takes
                precedence over all.
            drifts: Whether the loss is drifting upward.
        """
        counts = self.counts
        counts.clock += 1
        counts.skipped_steps += skipped
        counts.overflows_in_row = counts.overflows_in_row + 1 if overflowed else 0
        if overflowed:
            return "skip"
        if non_finite:
            counts.non_finite_in_row += 1
            if counts.non_finite_in_row <= self._max_non_finite:
                return "skip"
            if not self._rolls_back:
                return "stop"
            counts.non_finite_in_row = 0  # independent of the batch: earlier steps have damaged the weights
            return self._escalate()
        counts.non_finite_in_row = 0
        since = counts.clock - self._window_steps
        counts.recent_outliers = [at for at in counts.recent_outliers if at > since]
        counts.recent_outliers += [counts.clock] if outlier else []
        is_repair = self._action == "repair"  # which waits until a rise has proved to last
        if drifts or (len(counts.recent_outliers) > self._max_skips and not is_repair):
            counts.recent_outliers = []
            last = counts.last_rollback_at
            if not self._rolls_back or (is_repair and last is not None and counts.clock - last <= LEVEL_STEPS):
                return "relearn"  # under `repair`, the restored weights are good: data or objective have changed
            response = self._escalate()
            return "relearn" if is_repair and response == "stop" else response
        return "skip" if skipped else "none"

    @property
    def _rolls_back(self) -> bool:
        return self._action in ("repair", "rollback")

    def _escalate(self) -> Response:
        counts = self.counts
        last, counts.last_rollback_at = counts.last_rollback_at, counts.clock
        in_cooldown = last is not None and counts.clock - last <= self._cooldown_steps
        counts.recent_rollbacks = counts.recent_rollbacks + 1 if in_cooldown else 1
        if counts.recent_rollbacks > self._max_rollbacks:
            return "stop"
        counts.rollbacks += 1
        return "rollback_and_backoff" if in_cooldown else "rollback"

    @property
    def is_quiet(self) -> bool:
        """Whether the window contains no outlier, so that a snapshot can be taken."""
        counts = self.counts
        return not (counts.recent_outliers or counts.non_finite_in_row or counts.overflows_in_row)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return asdict(self.counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.counts = Counts(**state)
