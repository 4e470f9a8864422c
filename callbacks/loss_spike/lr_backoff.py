"""The learning rate of every group times a factor, for a while, under whatever schedule. Costs nothing."""

from typing import Any

from lightning.pytorch import Trainer

_RATES = {
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
}  # of a group, as torch's schedules leave them there


class LearningRateBackoff:
    """Multiplies rates and what schedules start from, and takes it back.

    Attributes:
        factor: In effect; 1: there is no cut.
        until: When it ends, on the clock of whoever cuts.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self.until = 0
        self._bases: list[list[float]] = []  # what schedules start from, the factor in it

    def cut(self, trainer: Trainer, factor: float, *, until: int) -> None:
        """Multiply, on top of what is in effect.

        Args:
            trainer: Whose optimizers and schedules.
            factor: Of every learning rate.
            until: On a clock that never goes back.
        """
        self.factor *= factor
        self.until = until
        self._scale(trainer, factor)

    def end_if_due(self, trainer: Trainer, clock: int) -> bool:
        """Give back what was taken when its time is over; whether it was."""
        if self.factor == 1.0 or clock < self.until:
            return False
        factor, self.factor = self.factor, 1.0
        self._scale(trainer, 1.0 / factor)
        return True

    def put_back(self, trainer: Trainer, factor_then: float) -> None:
        """After a rollback, which has brought rates and schedules of an earlier time: the cut of now holds on."""
        self._scale(trainer, self.factor / factor_then)

    def apply(self, trainer: Trainer) -> None:
        """After a resume, once rates are set up: some schedules bring the cut with them, some begin without."""
        if self.factor != 1.0 and _bases(trainer) != self._bases:
            self._scale(trainer, self.factor)

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"factor": self.factor, "until": self.until, "bases": self._bases}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a cut; `apply` brings it into effect."""
        self.factor, self.until, self._bases = state["factor"], state["until"], state["bases"]

    def _scale(self, trainer: Trainer, factor: float) -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                for key in _RATES & group.keys():
                    group[key] *= factor
        for scheduler in _schedulers(trainer):
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [base * factor for base in scheduler.base_lrs]
        self._bases = _bases(trainer)


def _bases(trainer: Trainer) -> list[list[float]]:
    return [
        [float(base) for base in getattr(scheduler, "base_lrs", [])]
        for scheduler in _schedulers(trainer)
    ]


def _schedulers(trainer: Trainer) -> list[Any]:
    """Every schedule, those inside of others too."""
    found: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
    for scheduler in found:
        found += getattr(scheduler, "_schedulers", [])
    return found
