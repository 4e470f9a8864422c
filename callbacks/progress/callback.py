"""One line of progress: microseconds per step, at most four redraws per second."""

import logging
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from ..logged_step import StepCounter, is_logged_step
from .text import VAL_LOSS, clock_text, find_first, step_text, train_text, val_text

if TYPE_CHECKING:
    from .bar import LiveBar

log = logging.getLogger("lightning_recipes")


class ProgressLine(Callback):
    """Shows progress on rank 0: on a terminal a bar redrawn in place, elsewhere a plain line per logged step.

    Useful always; it replaces Lightning's progress bar.

    Every line goes to the logger "lightning_recipes" at INFO in both cases. While there is a bar, its records carry
    `console=False`, so that a console handler can filter them out and a file handler keep them. A process whose
    logging is not configured gets a handler to stderr for the duration of `fit`. Metrics are read at logged steps
    only, after the module's own `on_train_batch_end` has run: when the next batch, a validation or the end of
    training begins.

    Args:
        refresh_per_second: Most redraws of the bar per second.

    Example:
        >>> trainer = Trainer(
        ...     callbacks=[ProgressLine()], enable_progress_bar=False, accelerator="cpu", logger=False
        ... )
        >>> trainer.callbacks[0].state_dict()
        {}
    """

    def __init__(self, *, refresh_per_second: Annotated[float, "> 0"] = 4.0) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self._min_redraw_seconds = 1.0 / refresh_per_second
        self._steps = StepCounter()
        self._handler: logging.Handler | None = None
        self._bar: LiveBar | None = None
        self._begin(total=None)

    def _begin(self, *, total: int | None) -> None:
        self._total = total
        self._pending_step: int | None = None  # logged, not yet written
        self._timed_from: tuple[int, float] | None = None  # step and time at the end of the first step
        self._redrawn_at = -math.inf
        self._train_text = ""
        self._val_loss: float | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._begin(total=_total_steps(trainer))
        self._steps.start(trainer)
        if sys.stderr.isatty() and sys.stdout.isatty():  # `| tee log` wants plain lines
            from .bar import LiveBar  # rich: 50 ms that only a terminal needs

            self._bar = LiveBar()
            self._bar.start()
            self._redraw(trainer.global_step)
        elif not log.hasHandlers():
            self._handler = logging.StreamHandler()
            log.addHandler(self._handler)
            log.setLevel(logging.INFO)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._pending_step is not None:
            self._write_row(trainer)
        if self._bar is not None and self.clock() - self._redrawn_at >= self._min_redraw_seconds:
            self._redraw(trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero or not self._steps.stepped(trainer):
            return
        step = trainer.global_step
        if self._timed_from is None:
            self._timed_from = (step, self.clock())
        if is_logged_step(trainer):
            self._pending_step = step

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_row(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.sanity_checking:
            return
        metrics = _read_metrics(trainer)
        self._val_loss = find_first(metrics, VAL_LOSS)
        text = val_text(metrics)
        if text:
            self._log(f"{step_text(trainer.global_step, self._total)}  {text}")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_row(trainer)
        if self._bar is not None:
            self._train_text = train_text(_read_metrics(trainer), val_loss=self._val_loss)
            self._redraw(trainer.global_step)
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._handler is not None:
            log.removeHandler(self._handler)
            log.setLevel(logging.NOTSET)
            self._handler = None

    def _write_row(self, trainer: Trainer) -> None:
        """Log the pending row, if there is one."""
        if self._pending_step is None:
            return
        step, self._pending_step = self._pending_step, None
        metrics = _read_metrics(trainer)
        parts = [step_text(step, self._total), train_text(metrics), self._time_left(step)]
        self._log("  ".join(part for part in parts if part))
        self._train_text = train_text(metrics, val_loss=self._val_loss)

    def _log(self, line: str) -> None:
        log.info("%s", line, extra={"console": self._bar is None})

    def _redraw(self, step: int) -> None:
        assert self._bar is not None
        fraction = step / self._total if self._total is not None else None
        parts = [self._train_text, self._time_left(step)]
        self._bar.draw(
            fraction=fraction,
            before=step_text(step, self._total),
            after="  ".join(part for part in parts if part),
        )
        self._redrawn_at = self.clock()

    def _time_left(self, step: int) -> str:
        """Estimate from the pace since the end of the first step, evaluation and saving included; "" if unknown."""
        if self._total is None or self._timed_from is None or step <= self._timed_from[0]:
            return ""
        first_step, first_time = self._timed_from
        step_seconds = (self.clock() - first_time) / (step - first_step)
        return f"{clock_text(step_seconds * max(0, self._total - step))} left"


def _total_steps(trainer: Trainer) -> int | None:
    """Return the optimizer steps of the whole fit; None if only the user or the data will end it."""
    total = trainer.estimated_stepping_batches
    return int(total) if math.isfinite(total) and total > 0 else None


def _read_metrics(trainer: Trainer) -> dict[str, float]:
    """Return the present value of every metric logged so far."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
