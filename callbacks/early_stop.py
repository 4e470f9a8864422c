"""Ends a run whose validation no longer improves: Lightning's EarlyStopping, switched on by one number."""

from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from callbacks.events import tell


class EarlyStop(EarlyStopping):
    """Tells it in one line and one event, `stop`.

    Args:
        after: Validations without a better value; None: the run is never ended.
        metric: What must improve.
        mode: Whether less or more of it is better.
        min_delta: A smaller improvement is none.
    """

    def __init__(
        self,
        *,
        after: int | None,
        metric: str,
        mode: Literal["min", "max"],
        min_delta: float,
    ) -> None:
        super().__init__(monitor=metric, mode=mode, patience=after or 1, min_delta=min_delta)
        self._is_on = after is not None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._check_on_train_epoch_end = False  # an endless stream has no such end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_on or trainer.should_stop:
            return
        super().on_validation_end(trainer, pl_module)
        if trainer.should_stop:
            step = trainer.global_step
            why = f"{self.monitor} has not improved for {self.patience} validations"
            best: Any = float(self.best_score)
            line = f"Step {step}: {why}, the best was {best:.4f}; the run ends"
            tell(trainer, line, "stop", step, why=why)
