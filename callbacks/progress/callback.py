"""Show training progress on one line; costs microseconds per step, redrawn at most four times per second."""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from ..lightning_internals import Row, RowTap, as_floats, get_learning_rates
from ..lightning_packages import ProgressBar
from ..logged_step import StepCounter, completed_steps
from ..protocols import SupportsRow
from .notebook import NotebookBar, is_notebook
from .text import (
    clock_text,
    epoch_text,
    find_train_loss,
    find_val_loss,
    position_text,
    shown_text,
    step_text,
    train_text,
    val_text,
)

if TYPE_CHECKING:
    from .bar import LiveBar

log = logging.getLogger("lightning_recipes")


class ProgressLine(ProgressBar):
    """Shows progress on rank 0: a bar redrawn in place on a terminal, in a notebook with a chart of the losses.

    Elsewhere, it prints a plain line per logged step.

    Replaces Lightning's progress bar. `self.log(prog_bar=True)` adds a metric; the loss, gradient norm, learning rate
    and speed are shown if they are logged. The bar needs the package rich; without it, a terminal gets the lines too.

    Every line also goes to the logger "lightning_recipes" at INFO. While the bar is shown, these records carry
    `console=False`, so that a console handler can drop them while a file handler keeps them. Without a bar, INFO
    records of this logger are shown on the console for the duration of `fit` even if the logging setup would drop
    them, unless a level is set on this logger itself.

    Args:
        refresh_per_second: Maximum number of redraws per second.

    Raises:
        ValueError: `refresh_per_second` is not above 0.

    Example:
        >>> trainer = Trainer(callbacks=[ProgressLine()], accelerator="cpu", logger=False)
        >>> trainer.progress_bar_callback is trainer.callbacks[0]
        True
    """

    only_shows: ClassVar[bool] = True  # neither what is trained nor what is measured depends on it

    def __init__(self, *, refresh_per_second: Annotated[float, "> 0"] = 4.0) -> None:
        if not refresh_per_second > 0:
            raise ValueError(
                f"refresh_per_second is {refresh_per_second}; the bar is redrawn at a rate above 0; set 4, or"
                " Trainer(enable_progress_bar=False) without this callback for no progress"
            )
        super().__init__()
        self.clock: Callable[[], float] = time.monotonic
        self._is_enabled = True
        self._lacks_rich = False
        self._min_redraw_seconds = 1.0 / refresh_per_second
        self._steps = StepCounter()
        self._is_showing: logging.Handler | None = None
        self._bar: LiveBar | NotebookBar | None = None
        self._tap: RowTap | None = None
        self._begin()

    def _begin(self) -> None:
        self._step = 0
        self._total: int | None = None
        self._timed_from: tuple[int, float] | None = None  # step and time at the end of the first step
        self._redrawn_at = -math.inf
        self._module_row: Mapping[str, float | Tensor] = {}  # current step's row, if the module is a SupportsRow
        self._shown: tuple[dict[str, float], str] = ({}, "")  # metrics of the newest row, and what else it shows
        self._val_loss: float | None = None

    @override
    def disable(self) -> None:
        self._is_enabled = False

    @override
    def enable(self) -> None:
        self._is_enabled = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_enabled:
            return
        self._begin()
        self._step = completed_steps(trainer)
        self._total = _total_steps(trainer)
        self._steps.start(trainer)
        self._tap = RowTap(trainer, lambda row: self._receive(trainer, pl_module, row))
        if self._start_bar():
            self._redraw(trainer, pl_module)
        else:
            self._is_showing = show_info(log)

    def _start_bar(self) -> bool:
        """Start the bar in a notebook, and where both streams are terminals; return whether there is one.

        `| tee log` gets plain lines.
        """
        if self._is_enabled and self._bar is None and is_notebook():
            self._bar = NotebookBar()
            self._bar.start()
        if isinstance(self._bar, NotebookBar):
            return True
        # a stream that the shell has closed is None
        is_terminal = all(stream is not None and stream.isatty() for stream in (sys.stderr, sys.stdout))
        if not (self._is_enabled and is_terminal) or self._lacks_rich:
            return False
        if self._bar is None:
            try:
                from .bar import LiveBar  # importing rich takes 50 ms, only needed on a terminal
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "rich":
                    raise
                self._lacks_rich = True
                log.warning("no progress bar: it needs rich; type: pip install rich")
                return False
            self._bar = LiveBar()
            self._bar.start()
        return True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._is_redraw_due():
            self._redraw(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_enabled or not self._steps.stepped(trainer):
            return
        self._step = completed_steps(trainer)
        self._total = _total_steps(trainer)
        if self._timed_from is None:
            self._timed_from = (self._step, self.clock())
        # this step's dict: later callbacks still add to it before it is written
        self._module_row = pl_module.recipes_row if isinstance(pl_module, SupportsRow) else {}

    def _receive(self, trainer: Trainer, pl_module: LightningModule, row: Row) -> None:
        """Log the progress line for a row that Lightning has just written."""
        metrics = row.metrics | row.shown
        if row.kind == "step":
            metrics |= get_learning_rates(trainer)
            # a rollback after this step, before its row is written, may have lowered the count
            self._step = max(self._step, completed_steps(trainer))
            metrics |= as_floats(self._module_row)
            shown = shown_text(self._select_shown(trainer, pl_module, row), beside=metrics)
            parts = [self._where(trainer), train_text(metrics), shown, self._time_left()]
            self._shown = (metrics, shown)
            self._chart("train loss", find_train_loss(metrics))
        elif row.kind == "evaluation":
            self._val_loss = find_val_loss(metrics)
            self._chart("val loss", self._val_loss)
            parts = [self._where(trainer), text] if (text := val_text(metrics)) else []
        else:
            # per-step metrics have been shown already; epoch-level values have different names
            parts = [self._where(trainer), "epoch mean", text] if (text := epoch_text(metrics)) else []
        if parts:
            line = "  ".join(part for part in parts if part)
            log.info("%s", line, extra={"console": self._bar is None})

    def _train_text(self) -> str:
        """Return the metrics of the newest row with the newest validation loss; "" before the first row."""
        metrics, shown = self._shown
        text = train_text(metrics, val_loss=self._val_loss) if metrics else ""
        return "  ".join(part for part in (text, shown) if part)

    def _chart(self, name: str, loss: float | None) -> None:
        if isinstance(self._bar, NotebookBar) and loss is not None:
            self._bar.add_loss(name, self._step, loss)

    def _select_shown(self, trainer: Trainer, pl_module: LightningModule, row: Row) -> dict[str, Any]:
        """Return the metrics of `get_metrics` without values from earlier epochs, which Lightning keeps."""
        kept = trainer.progress_bar_metrics
        items = self.get_metrics(trainer, pl_module).items()
        return {name: value for name, value in items if name != "v_num" and (name not in kept or name in row.shown)}

    def _where(self, trainer: Trainer) -> str:
        num_epochs = trainer.max_epochs
        epoch = f"epoch {trainer.current_epoch + 1}/{num_epochs}  " if num_epochs and num_epochs > 1 else ""
        return epoch + step_text(self._step, self._total)

    @override
    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._draw_evaluation(trainer, "validation", *args, **kwargs)

    @override
    def on_test_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._draw_evaluation(trainer, "test", *args, **kwargs)

    @override
    def on_predict_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._draw_evaluation(trainer, "prediction", *args, **kwargs)

    def _draw_evaluation(
        self,
        trainer: Trainer,
        name: str,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draw the progress through the current data loader."""
        self.has_dataloader_changed(dataloader_idx)
        if trainer.sanity_checking or not self._start_bar() or not self._is_redraw_due():
            return
        total = {
            "validation": lambda: self.total_val_batches_current_dataloader,
            "test": lambda: self.total_test_batches_current_dataloader,
            "prediction": lambda: self.total_predict_batches_current_dataloader,
        }[name]()
        assert self._bar is not None, "started above"
        fraction = (batch_idx + 1) / total if math.isfinite(total) and total else None
        self._bar.draw(fraction=fraction, before=position_text(name, batch_idx + 1, total), after=self._train_text())
        self._redrawn_at = self.clock()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            self._redraw(trainer, pl_module)
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._tap is not None:
            self._tap.detach()
            self._tap = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        stop_showing(log, self._is_showing)
        self._is_showing = None

    def _is_redraw_due(self) -> bool:
        return self._bar is not None and self.clock() - self._redrawn_at >= self._min_redraw_seconds

    def _redraw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._bar is not None
        fraction = self._step / self._total if self._total else None
        parts = [self._train_text(), self._time_left()]
        if not parts[0]:  # no row yet
            parts[0] = shown_text(self.get_metrics(trainer, pl_module), beside={})
        self._bar.draw(fraction=fraction, before=self._where(trainer), after="  ".join(part for part in parts if part))
        self._redrawn_at = self.clock()

    def _time_left(self) -> str:
        """Estimate the time left from the pace since the first step, evaluation and saving included; "" if unknown."""
        if self._total is None or self._timed_from is None or self._step <= self._timed_from[0]:
            return ""
        first_step, first_time = self._timed_from
        step_seconds = (self.clock() - first_time) / (self._step - first_step)
        return f"{clock_text(step_seconds * max(0, self._total - self._step))} left"


def _total_steps(trainer: Trainer) -> int | None:
    """Return the total steps of the fit, counted like `completed_steps`; None if unknown."""
    if trainer.lightning_module.automatic_optimization:
        total = float(trainer.estimated_stepping_batches)
        return int(total) if math.isfinite(total) and total > 0 else None
    epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else math.inf
    batches = trainer.num_training_batches * epochs
    if trainer.max_steps >= 0:  # counts the steps of all optimizers: extrapolate the steps per batch
        done = trainer.global_step
        batches = min(batches, math.ceil(trainer.max_steps * completed_steps(trainer) / done) if done else math.inf)
    return int(batches) if math.isfinite(batches) else None


# Show a logger's INFO records on the console even if the logging setup would drop them.


def show_info(log: logging.Logger) -> logging.Handler | None:
    """Show a logger's INFO records on the console until `stop_showing` is called.

    Returns:
        The handler that `stop_showing` removes; None if they are shown already or the logger's own level forbids it.
    """
    on_console = any(_is_console(handler) and handler.level <= logging.INFO for handler in _handlers(log))
    if on_console and log.isEnabledFor(logging.INFO):
        return None
    if log.level not in (logging.NOTSET, logging.INFO, logging.DEBUG):
        return None
    handler: logging.Handler = logging.NullHandler() if on_console else logging.StreamHandler()
    handler.set_name(f"level {log.level}")
    log.addHandler(handler)
    log.setLevel(min(log.level or logging.INFO, logging.INFO))
    return handler


def stop_showing(log: logging.Logger, handler: logging.Handler | None) -> None:
    """Undo `show_info`."""
    if handler is not None:
        log.removeHandler(handler)
        log.setLevel(int(str(handler.name).removeprefix("level ")))


def _handlers(log: logging.Logger) -> Iterator[logging.Handler]:
    """Yield every handler that receives this logger's records."""
    logger: logging.Logger | None = log
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _is_console(handler: logging.Handler) -> bool:
    """Return whether a handler writes to something other than a file."""
    return not isinstance(handler, (logging.FileHandler, logging.NullHandler))
