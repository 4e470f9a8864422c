"""Stop a run whose validation metric no longer improves: Lightning's EarlyStopping, switched on by one number."""

from typing import Annotated, Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from .events import log_event


class EarlyStop(EarlyStopping):
    """Log the stop as one console line and one event, `stop`.

    Args:
        patience: Validations without an improvement before the run stops. None disables early stopping.
        monitor: Metric that must improve.
        mode: "min" or "max": the direction that counts as an improvement.
        min_delta: Smaller changes do not count as an improvement.
    """

    def __init__(
        self,
        *,
        patience: Annotated[int, ">= 1"] | None,
        monitor: str,
        mode: Literal["min", "max"],
        min_delta: float,
    ) -> None:
        super().__init__(monitor=monitor, mode=mode, patience=patience or 1, min_delta=min_delta)
        self._is_on = patience is not None

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
            log_event(trainer, line, "stop", step, why=why)
