"""Log the float16 loss scale and the steps skipped on overflow: one device read per logged step."""

from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from .lightning_packages import Callback
from .logged_step import StepCounter, is_logged_step, log_row


class LossScaleMonitor(Callback):
    """Logs `precision/loss_scale` and `precision/overflow_steps` at logged steps; nothing without a loss scaler.

    Useful when training in float16: many overflow steps mean that the loss scale does not settle or that the run
    is diverging.

    `precision/overflow_steps` counts the steps skipped since the run began, across resumes. The count comes from the
    strategy if it is a `CountsOverflows`, or from DeepSpeed's engine. Otherwise a drop of Lightning's loss scale
    counts as a skipped step, which requires reading the scale at every step.

    Example:
        >>> trainer = Trainer(callbacks=[LossScaleMonitor()], accelerator="cpu", logger=False)
        >>> trainer.callbacks[0].summary()
        {'skipped_steps': 0}
    """

    summary_fields: ClassVar[dict[str, Any]] = {"skipped_steps": 0}
    summed_fields: ClassVar[frozenset[str]] = frozenset({"skipped_steps"})

    def __init__(self) -> None:
        super().__init__()
        self._steps = StepCounter()
        self._earlier = 0  # overflow steps before this process
        self._in_process = 0
        self._last_scale: float | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)
        self._earlier, self._in_process = self._earlier + self._in_process, 0
        self._last_scale = _get_scale(trainer)
        self._counted_before = _count_overflows(trainer) or 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._steps.stepped(trainer):
            counted = _count_overflows(trainer)
            if counted is not None:
                self._in_process = counted - self._counted_before
            else:
                self._watch_scale(trainer)
        if is_logged_step(trainer) and (scale := _get_scale(trainer)) is not None:
            row = {"precision/loss_scale": scale, "precision/overflow_steps": self._total()}
            log_row(pl_module, row)

    def on_rollback(self, trainer: Trainer, pl_module: LightningModule, from_step: int, to_step: int) -> None:
        """Continue from the restored scale: one below that of the discarded steps is no overflow."""
        self._last_scale = _get_scale(trainer)

    def _watch_scale(self, trainer: Trainer) -> None:
        before, self._last_scale = self._last_scale, _get_scale(trainer)
        if before is not None and self._last_scale is not None:
            self._in_process += self._last_scale < before

    def _total(self) -> int:
        return self._earlier + self._in_process

    def summary(self) -> dict[str, int]:
        """Return the number of steps skipped because a gradient was not finite."""
        return {"skipped_steps": self._total()}

    @override
    def state_dict(self) -> dict[str, int]:
        return {"overflow_steps": self._total()}

    @override
    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._earlier, self._in_process = state_dict["overflow_steps"], 0


def _count_overflows(trainer: Trainer) -> int | None:
    """Return the number of steps skipped in this process; None if neither strategy nor engine counts them."""
    strategy: Any = trainer.strategy
    if hasattr(strategy, "num_overflows"):
        return int(strategy.num_overflows)
    engine = getattr(strategy, "deepspeed_engine", None)
    return None if engine is None else int(engine.skipped_steps)


def _get_scale(trainer: Trainer) -> float | None:
    """Return the current loss scale; None if the loss is not scaled."""
    strategy: Any = trainer.strategy
    if hasattr(strategy, "current_loss_scale"):
        scale = strategy.current_loss_scale
        return None if scale is None else float(scale)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        return float(scaler.get_scale())
    engine = getattr(strategy, "deepspeed_engine", None)
    return float(engine.loss_scale()) if engine is not None and engine.fp16_enabled() else None
