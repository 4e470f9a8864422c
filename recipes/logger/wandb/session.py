"""A W&B run behind a thread: what fails or hangs there never reaches training. A queue entry a call, about 10 us."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

LOGGER = logging.getLogger("lightning_recipes")
_MAX_WAITING = 10_000  # calls that W&B has not taken: beyond that training waits for it
_STALL_SECONDS = 30.0  # and no longer
_EXIT_SECONDS = 5.0  # for its process to end once the run is finished


class WandbSession:
    """Calls on one run, in their order, until one fails; from then on they are left out.

    Args:
        start: Makes the run; None: W&B is switched off.
        patience_seconds: How long training waits for it.
    """

    def __init__(self, start: Callable[[], Any], *, patience_seconds: float) -> None:
        self.run: Any = None
        self._is_lost = threading.Event()
        self._waiting: queue.Queue[tuple[Callable[[], None], threading.Event | None]]
        self._waiting = queue.Queue(maxsize=_MAX_WAITING)
        threading.Thread(target=self._work, name="wandb", daemon=True).start()

        def make() -> None:
            self.run = start()

        self._put(make, patience_seconds)

    def tell(self, what: Callable[[Any], None]) -> None:
        """Have something done with the run, soon."""

        def on_the_run() -> None:
            if self.run is not None:
                what(self.run)

        self._put(on_the_run)

    def close(self, exit_code: int, *, patience_seconds: float) -> None:
        """Finish the run with an exit code and end W&B's process; what W&B does not take in time stays on disk."""
        self.tell(lambda run: run.finish(exit_code=exit_code))
        if self.run is not None:
            self._put(lambda: None, patience_seconds)
        self._put(_end_process, _EXIT_SECONDS)

    def _put(self, call: Callable[[], None], patience_seconds: float | None = None) -> None:
        if self._is_lost.is_set():
            return
        done = None if patience_seconds is None else threading.Event()
        try:
            self._waiting.put((call, done), timeout=_STALL_SECONDS)
        except queue.Full:
            self._lose(f"it has taken nothing for {_STALL_SECONDS:g} s")
            _kill_process()
        if done is not None and not done.wait(patience_seconds):
            self._lose(f"it does not answer within {patience_seconds:g} s")
            _kill_process()

    def _work(self) -> None:
        while True:
            call, done = self._waiting.get()
            if not self._is_lost.is_set():
                try:
                    call()
                except (Exception, SystemExit) as error:
                    # else it was given up while it hung, and killed
                    if not self._is_lost.is_set():
                        self._lose(in_a_line(error))
                        _end_process()
            if done is not None:
                done.set()

    def _lose(self, why: str) -> None:
        if not self._is_lost.is_set():
            self._is_lost.set()
            LOGGER.warning(f"W&B is left out from here on: {why}; metrics.csv has every row")


def in_a_line(error: BaseException) -> str:
    """What an error says first; its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _end_process() -> None:
    """Of W&B's own; what it has registered for the end of this process is undone, and cannot complain then."""
    import wandb

    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()


def _kill_process() -> None:
    """One that hangs would be waited for at the end of this process."""
    from wandb.sdk import wandb_setup

    with contextlib.suppress(Exception, SystemExit):
        wandb_setup.singleton()._connection._proc._process.kill()
    ending = threading.Thread(target=_end_process, daemon=True)
    ending.start()
    ending.join(_EXIT_SECONDS)
