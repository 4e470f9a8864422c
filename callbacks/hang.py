"""Log where a rank is when nothing happens for a long time: a clock reading per batch, and a thread that sleeps."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from .events import EventKind, log_event
from .lightning_packages import Callback
from .logged_step import completed_steps

log = logging.getLogger("lightning_recipes")
_CHECKS = 10  # of the clock per timeout


class HangMonitor(Callback):
    """Logs the stack of this rank's main thread once no batch has begun or ended for `timeout_seconds`.

    Useful on several ranks: one that hangs in its data loader or file system keeps all others waiting in a collective,
    and only the stacks tell which one it is. Each rank logs its own, once per hang, and the run goes on. If it does, a
    line and a `hang` event give the duration.

    Batches of training and evaluation count. Compilation, checkpoints and starting workers happen between them, so the
    timeout should exceed the longest of these.

    Args:
        timeout_seconds: Time without a batch after which the stack is logged.

    Raises:
        ValueError: `timeout_seconds` is not above 0.

    Example:
        >>> monitor = HangMonitor(timeout_seconds=300)
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", logger=False)
        >>> monitor.summary()
        {'hangs': 0}
    """

    summary_fields: ClassVar[dict[str, Any]] = {"hangs": 0}
    events: ClassVar[dict[str, EventKind]] = {"hang": {}}

    def __init__(self, *, timeout_seconds: Annotated[float, "> 0"] = 600.0) -> None:
        super().__init__()
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds}; a run would always hang; set timeout_seconds=600")
        self.clock: Callable[[], float] = time.monotonic
        self._timeout_seconds = timeout_seconds
        self._num_hangs = 0
        self._beat = 0.0  # time of the newest batch
        self._where = ""
        self._main_thread = 0
        self._is_reported = False  # the current hang
        self._ended: threading.Event | None = None  # set when the thread is to end; None without a thread

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()
        self._main_thread = threading.get_ident()
        self._is_reported = False
        self._record(trainer)
        self._ended = threading.Event()
        threading.Thread(target=self._watch, args=(self._ended,), name="HangMonitor", daemon=True).start()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._record(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._record(trainer)

    @override
    def on_validation_batch_start(self, trainer: Trainer, *args: Any, **arguments: Any) -> None:
        self._record(trainer)

    @override
    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **arguments: Any) -> None:
        self._record(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def _record(self, trainer: Trainer) -> None:
        """Note that the run goes on, and how long it had not."""
        before, self._beat = self._beat, self.clock()
        step = completed_steps(trainer)
        self._where = f"Step {step}, rank {trainer.global_rank}"
        if self._is_reported:
            self._is_reported = False
            seconds = self._beat - before
            line = f"Step {step}: the run goes on after {seconds:.0f} s without a batch"
            log_event(trainer, line, "hang", step, seconds=round(seconds, 1))

    def _end(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.set()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(self._timeout_seconds / _CHECKS):
            self.check()

    def check(self) -> None:
        """Log the stack of the main thread if no batch has begun or ended for too long; from any thread."""
        seconds = self.clock() - self._beat
        if self._is_reported or seconds < self._timeout_seconds:
            return
        self._is_reported = True
        self._num_hangs += 1
        frame = sys._current_frames().get(self._main_thread)
        stack = "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "  an ended thread"
        log.warning(f"{self._where}: no batch has begun or ended for {seconds:.0f} s; the main thread is in\n{stack}")

    def summary(self) -> dict[str, int]:
        """Return how often this rank has hung in this process."""
        return {"hangs": self._num_hangs}
