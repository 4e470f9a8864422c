"""Stop a run when its validation metric no longer improves or passes a threshold: Lightning's EarlyStopping."""

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from .events import EventKind, log_event
from .lightning_packages import EarlyStopping
from .logged_step import completed_steps

_ANY_NUMBER = 10**9  # of checks without an improvement


class EarlyStop(EarlyStopping):
    """Stops the run when a metric stops improving, and logs the reason as a console line and a `stop` event.

    Useful when a metric may plateau long before `max_steps`, as in a hyperparameter sweep, or when a value is the goal.
    The metric is checked after each validation or, in a run without validation, after each training epoch.

    Args:
        monitor: Name of the metric that must improve.
        patience: Checks without an improvement before the run stops. None: any number; the callback is then off unless
            a threshold is set.
        mode: "min" if lower is better, "max" if higher is better.
        min_delta: Smallest change that counts as an improvement, in the metric's unit.
        check_finite: Stop immediately when the metric is NaN or inf.
        stopping_threshold: Stop as soon as the metric is better than this value: the goal is reached. None: no goal.
        divergence_threshold: Stop as soon as the metric is worse than this value. None: no limit.
        strict: Whether a check without the metric is an error; False skips that check.

    Attributes:
        stopped_because: Why it ended the run; None if it did not.

    Raises:
        ValueError: An argument is outside its range.
        RuntimeError: Raised by Lightning at the first check if the run does not log `monitor`, unless `strict=False`.

    Example:
        >>> stop = EarlyStop(monitor="val/loss", patience=5)
        >>> trainer = Trainer(callbacks=[stop], accelerator="cpu", logger=False)
        >>> stop in trainer.callbacks
        True
    """

    # kept on resume: it records why this process ended
    events: ClassVar[dict[str, EventKind]] = {"stop": {"kept_on_resume": True}}

    def __init__(
        self,
        *,
        monitor: str,
        patience: Annotated[int, ">= 1"] | None = 3,
        mode: Literal["min", "max"] = "min",
        min_delta: Annotated[float, ">= 0"] = 0.0,
        check_finite: bool = True,
        stopping_threshold: Annotated[float, "< inf"] | None = None,
        divergence_threshold: Annotated[float, "< inf"] | None = None,
        strict: bool = True,
    ) -> None:
        if patience is not None and patience < 1:
            raise ValueError(f"patience is {patience}; the run must have 1 or more checks; set None to disable it")
        if mode not in ("min", "max"):
            raise ValueError(f"mode is {mode!r}; a metric improves downwards or upwards; set 'min' or 'max'")
        if not min_delta >= 0:
            raise ValueError(
                f"min_delta is {min_delta}; an improvement is 0 or more; set min_delta=0, and mode for its sign"
            )
        goal, limit = stopping_threshold, divergence_threshold
        if goal is not None and limit is not None and (goal > limit if mode == "min" else goal < limit):
            raise ValueError(
                f"stopping_threshold is {stopping_threshold} and divergence_threshold is {divergence_threshold}; with"
                f" mode={mode!r} every value is beyond one of them; exchange them"
            )
        super().__init__(
            monitor=monitor,
            mode=mode,
            patience=_ANY_NUMBER if patience is None else patience,
            min_delta=min_delta,
            check_finite=check_finite,
            stopping_threshold=stopping_threshold,
            divergence_threshold=divergence_threshold,
            strict=strict,
        )
        self._is_on = not (patience is None and goal is None and limit is None)
        self.stopped_because: str | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        # Lightning may default to checking at the end of an epoch, which an infinite data stream never reaches
        self._check_on_train_epoch_end = not trainer.enable_validation

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_on:
            self._check(trainer, super().on_validation_end, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_on:
            self._check(trainer, super().on_train_epoch_end, pl_module)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the checks so far; the patience is that of this start, and the run goes on."""
        patience = self.patience
        # Lightning 2.6 also saves why the earlier process stopped
        kept = {name: value for name, value in state_dict.items() if not name.startswith("stopping_reason")}
        super().load_state_dict(kept)
        self.patience = patience

    def _check(
        self, trainer: Trainer, check: Callable[[Trainer, LightningModule], None], module: LightningModule
    ) -> None:
        """Check the metric, also where the run ends for another reason: it may be extended."""
        is_ending = trainer.should_stop
        check(trainer, module)
        if trainer.should_stop and not is_ending:
            step = completed_steps(trainer)
            self.stopped_because = why = self._describe_threshold(trainer) or self._describe(trainer)
            best = float(self.best_score)
            known = f", the best was {best:.4f}" if math.isfinite(best) else ""
            log_event(trainer, f"Step {step}: {why}{known}; the run ends", "stop", step, why=why)

    def _describe_threshold(self, trainer: Trainer) -> str | None:
        """Return the threshold that this rank's metric has passed; None if it has passed none."""
        value = trainer.callback_metrics[self.monitor].squeeze()
        if self.stopping_threshold is not None and self.monitor_op(value, self.stopping_threshold):
            return f"{self.monitor} is {float(value):.4g}, better than stopping_threshold={self.stopping_threshold}"
        if self.divergence_threshold is not None and self.monitor_op(-value, -self.divergence_threshold):
            return f"{self.monitor} is {float(value):.4g}, worse than divergence_threshold={self.divergence_threshold}"
        return None

    def _describe(self, trainer: Trainer) -> str:
        value = float(trainer.callback_metrics[self.monitor])
        if self.check_finite and not math.isfinite(value):
            return f"{self.monitor} is {value}"
        if self.wait_count >= self.patience:
            checks = "epoch" if self._check_on_train_epoch_end else "validation"
            checks += "s" if self.patience > 1 else ""
            return f"{self.monitor} has not improved for {self.patience} {checks}"
        return f"{self.monitor} ended the run on another rank"
