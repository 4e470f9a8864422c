"""Multiply the learning rate of every group by a factor, for a while, under any schedule. Costs nothing."""

from typing import Any

from lightning.pytorch import Trainer

_RATES = {"lr", "initial_lr", "max_lr", "min_lr"}  # keys of a group that torch's schedules read


class LearningRateBackoff:
    """Scales learning rates, and the base rates that schedules start from, and undoes it later.

    Attributes:
        factor: In effect; 1: no backoff.
        until: When it ends, on the caller's clock.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self.until = 0
        self._bases: list[list[float]] = []  # base rates of the schedules, factor included

    def start(self, trainer: Trainer, factor: float, *, until: int) -> None:
        """Multiply the rates, on top of the factor in effect.

        Args:
            trainer: Whose optimizers and schedules.
            factor: For every learning rate.
            until: When the backoff ends, on a clock that never decreases.
        """
        self.factor *= factor
        self.until = until
        self._scale(trainer, factor)

    def end_if_due(self, trainer: Trainer, clock: int) -> bool:
        """Restore the rates when the backoff is over; return whether it ended now."""
        if self.factor == 1.0 or clock < self.until:
            return False
        factor, self.factor = self.factor, 1.0
        self._scale(trainer, 1.0 / factor)
        return True

    def restore(self, trainer: Trainer, snapshot_factor: float) -> None:
        """Apply the present factor after a rollback, which has restored the rates of the snapshot.

        Args:
            trainer: Whose optimizers and schedules.
            snapshot_factor: In effect when the snapshot was taken.
        """
        self._scale(trainer, self.factor / snapshot_factor)

    def apply(self, trainer: Trainer) -> None:
        """Apply the factor after a resume, once rates are set up.

        Some schedules restore their base rates from the checkpoint, with the factor in them; others start without.
        """
        if self.factor != 1.0 and _get_base_rates(trainer) != self._bases:
            self._scale(trainer, self.factor)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"factor": self.factor, "until": self.until, "bases": self._bases}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`; call `apply` to bring the factor into effect."""
        self.factor, self.until, self._bases = state["factor"], state["until"], state["bases"]

    def _scale(self, trainer: Trainer, factor: float) -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                for key in _RATES & group.keys():
                    group[key] *= factor
        for scheduler in _get_schedulers(trainer):
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [base * factor for base in scheduler.base_lrs]
        self._bases = _get_base_rates(trainer)


def _get_base_rates(trainer: Trainer) -> list[list[float]]:
    return [[float(base) for base in getattr(scheduler, "base_lrs", [])] for scheduler in _get_schedulers(trainer)]


def _get_schedulers(trainer: Trainer) -> list[Any]:
    """Return every schedule, those nested in others (SequentialLR, ChainedScheduler) too."""
    found: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
    for scheduler in found:  # grows while it is iterated over
        found += getattr(scheduler, "_schedulers", [])
    return found
