"""Stop a run whose validation metric no longer improves: Lightning's EarlyStopping, enabled by one number."""

from typing import Annotated, Any, ClassVar, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from typing_extensions import override

from .events import EventKind, log_event


class EarlyStop(EarlyStopping):
    """Stops the run and logs why, as one console line and one event `stop`.

    Useful when a metric may plateau long before `max_steps`, as in a hyperparameter sweep.

    Args:
        patience: Validations without an improvement before the run stops. None disables early stopping.
        monitor: Name of the metric that must improve.
        mode: "min" or "max": the direction that counts as an improvement.
        min_delta: Smallest change of the metric that counts as an improvement, in its own unit.

    Raises:
        RuntimeError: From Lightning, at the first validation: the run logs no metric called `monitor`.

    Example:
        >>> stop = EarlyStop(patience=5, monitor="val/loss", mode="min", min_delta=0.0)
        >>> trainer = Trainer(callbacks=[stop], accelerator="cpu", logger=False)
        >>> stop in trainer.callbacks
        True
    """

    # it explains how this process ended, which a resume does not undo
    events: ClassVar[dict[str, EventKind]] = {"stop": {"kept_on_resume": True}}

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

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        # Lightning may choose to check at the end of an epoch, which an endless stream of data never reaches
        self._check_on_train_epoch_end = False

    @override
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
