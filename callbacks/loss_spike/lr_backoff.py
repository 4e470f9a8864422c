"""Temporarily scale the learning rate of every parameter group, with any LR scheduler."""

from typing import Any

from lightning.pytorch import Trainer

_LR_KEYS = {"lr", "initial_lr", "max_lr", "min_lr"}  # param group keys that torch.optim.lr_scheduler reads


class LearningRateBackoff:
    """Scales learning rates, including the schedulers' `base_lrs`, until a given step.

    Attributes:
        factor: Current multiplier; 1.0 without a backoff.
        end_step: Step at which the backoff ends, as counted by the caller.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self.end_step = 0
        self._base_lrs: list[list[float]] = []  # base_lrs of the schedulers, factor included

    def start(self, trainer: Trainer, factor: float, *, end_step: int) -> None:
        """Multiply the learning rates, on top of the current factor.

        Args:
            trainer: The trainer whose optimizers and schedulers are scaled.
            factor: Multiplier of every learning rate.
            end_step: Step at which the backoff ends, in a count that never decreases, not even at a rollback.
        """
        self.factor *= factor
        self.end_step = end_step
        self._scale(trainer, factor)

    def end_if_due(self, trainer: Trainer, step: int) -> bool:
        """Undo the scaling if the backoff is over; return whether it ended now."""
        if self.factor == 1.0 or step < self.end_step:
            return False
        factor, self.factor = self.factor, 1.0
        self._scale(trainer, 1.0 / factor)
        return True

    def reapply_after_rollback(self, trainer: Trainer, snapshot_factor: float) -> None:
        """Reapply the current factor after a rollback has reset the learning rates to those of the snapshot.

        Args:
            trainer: The trainer whose optimizers and schedulers are scaled.
            snapshot_factor: Value of `factor` when the snapshot was taken.
        """
        self._scale(trainer, self.factor / snapshot_factor)

    def reapply_after_resume(self, trainer: Trainer) -> None:
        """Reapply the factor after a resume, once optimizers and schedulers are restored.

        Some schedulers restore `base_lrs` that already contain the factor; others compute them from the config.
        """
        if self.factor != 1.0 and _get_base_lrs(trainer) != self._base_lrs:
            self._scale(trainer, self.factor)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"factor": self.factor, "end_step": self.end_step, "base_lrs": self._base_lrs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; call `reapply_after_resume` to scale the learning rates."""
        self.factor, self.end_step = state["factor"], state["end_step"]
        self._base_lrs = state["base_lrs"]

    def _scale(self, trainer: Trainer, factor: float) -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                for key in _LR_KEYS & group.keys():
                    group[key] *= factor
        for scheduler in _get_schedulers(trainer):
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [base * factor for base in scheduler.base_lrs]
        self._base_lrs = _get_base_lrs(trainer)


def _get_base_lrs(trainer: Trainer) -> list[list[float]]:
    return [[float(base) for base in getattr(scheduler, "base_lrs", [])] for scheduler in _get_schedulers(trainer)]


def _get_schedulers(trainer: Trainer) -> list[Any]:
    """Return all schedulers, including those nested in SequentialLR and ChainedScheduler."""
    schedulers: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
    for scheduler in schedulers:  # extended during the iteration
        schedulers += getattr(scheduler, "_schedulers", [])
    return schedulers
