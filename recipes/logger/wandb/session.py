"""Calls on a W&B run on a thread of its own: an error or a hang there never reaches training. About 10 us per call."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

LOGGER = logging.getLogger("lightning_recipes")
_MAX_WAITING = 10_000  # calls in the queue; beyond that training waits for W&B
_STALL_SECONDS = 30.0  # … and at most this long
_EXIT_SECONDS = 5.0  # for W&B's process to exit


class WandbSession:
    """Makes calls on one run in order, until one fails or hangs; later ones are dropped.

    Args:
        start: Opens the run and returns it; None if W&B is disabled.
        timeout_seconds: How long training waits for it.
    """

    def __init__(self, start: Callable[[], Any], *, timeout_seconds: float) -> None:
        self.run: Any = None
        self._has_failed = threading.Event()
        self._waiting: queue.Queue[tuple[Callable[[], None], threading.Event]]
        self._waiting = queue.Queue(maxsize=_MAX_WAITING)
        threading.Thread(target=self._work, name="wandb", daemon=True).start()

        def open_run() -> None:
            self.run = start()

        self._wait(self._enqueue(open_run), timeout_seconds)

    def put(self, call: Callable[[Any], object]) -> None:
        """Make a call on the run soon; does not wait."""

        def call_run() -> None:
            if self.run is not None:
                call(self.run)

        self._enqueue(call_run)

    def close(self, exit_code: int, *, timeout_seconds: float) -> None:
        """Finish the run and end W&B's process; what was not uploaded in time stays on disk."""
        if self.run is not None:
            finished = self._enqueue(lambda: self.run.finish(exit_code=exit_code))
            self._wait(finished, timeout_seconds)
        self._wait(self._enqueue(_teardown), _EXIT_SECONDS)

    def _enqueue(self, call: Callable[[], None]) -> threading.Event:
        """Queue a call; the event is set when it has been made or dropped."""
        done = threading.Event()
        if self._has_failed.is_set():
            done.set()
            return done
        try:
            self._waiting.put((call, done), timeout=_STALL_SECONDS)
        except queue.Full:
            done.set()
            self._abandon(f"it has accepted nothing for {_STALL_SECONDS:g} s")
        return done

    def _wait(self, done: threading.Event, timeout_seconds: float) -> None:
        if not done.wait(timeout_seconds):
            self._abandon(f"it did not respond within {timeout_seconds:g} s")

    def _work(self) -> None:
        while True:
            call, done = self._waiting.get()
            if not self._has_failed.is_set():
                try:
                    call()
                except (Exception, SystemExit) as error:
                    self._abandon(first_line(error))
            done.set()

    def _abandon(self, reason: str) -> None:
        """Log one line and make no further call.

        W&B registers a hook that waits for its process when ours exits, without a limit. `wandb.teardown` removes
        the hook before it waits itself, so it is called on a daemon thread. W&B's process exits when it notices
        that ours is gone.
        """
        if self._has_failed.is_set():
            return
        self._has_failed.set()
        LOGGER.warning(f"W&B is switched off from here on: {reason}; metrics.csv has every row")
        ending = threading.Thread(target=_teardown, name="wandb_teardown", daemon=True)
        ending.start()
        ending.join(_EXIT_SECONDS)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its class name where it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _teardown() -> None:
    """End W&B's process and remove what it registered for the exit of ours."""
    import wandb

    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()
