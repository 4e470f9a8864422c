"""SIGTERM and SIGUSR1: a request to save and end after the step under way; a second one ends the process at once."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from recipes.runtime.exit_codes import ExitCode

LOGGER = logging.getLogger("lightning_recipes")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_SAME_REQUEST_SECONDS = 1.0  # a cluster may tell a process and, through its starter, tell it again


class Preempted(BaseException):
    """A signal has ended the run.

    Args:
        by: The signal's name.
        step: Optimizer steps completed.
        saved: Whether all of them are in a checkpoint.
    """

    def __init__(self, by: str, *, step: int, saved: bool) -> None:
        super().__init__(by)
        self.by = by
        self.step = step
        self.saved = saved


class SecondSignalError(BaseException):
    """A second request to stop, as an exception in the main thread.

    Args:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Requests:
    """Of this process: signals are the process's, so is what listens to them."""

    def __init__(self) -> None:
        self.by: str | None = None
        self.at = 0.0
        self.hand_to: Callable[[], None] | None = None
        self.second_ends = True


_REQUESTS = _Requests()


def listen(*, second_ends: bool) -> None:
    """Take the signals from now on. Until training takes over, the first one ends the process: nothing is lost.

    Args:
        second_ends: Whether a second signal ends this process; False where whoever started it does that.
    """
    _REQUESTS.by, _REQUESTS.hand_to, _REQUESTS.second_ends = None, None, second_ends
    for number in SIGNALS:
        signal.signal(number, _take)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # held back by whoever started this process


def set_handler(to: Callable[[], None] | None) -> None:
    """Let training answer a request, or, with None, nobody: the run is ending by itself."""
    _REQUESTS.hand_to = to if to is not None else _nobody
    if to is not None and _REQUESTS.by is not None:
        to()


def was_requested() -> bool:
    """Whether a signal has asked this process to stop."""
    return _REQUESTS.by is not None


def requested_by() -> str:
    """The name of the signal that asked."""
    return _REQUESTS.by or "a signal to another rank"


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Listen while a run is started, carried out and ended in this process."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    listen(second_ends=True)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Signals wait, for this process until the end, for those it starts until they `listen`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextlib.contextmanager
def forward_signals_to(tell: Callable[[int], None]) -> Iterator[None]:
    """Hand the first signal on to the processes that do the work, for which they have all the time they need.

    Raises:
        SecondSignalError: There is a second one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    asked_at: list[float] = []

    def hand_on(number: int, _: object) -> None:
        if not asked_at:
            asked_at.append(time.monotonic())
            tell(number)
        elif time.monotonic() - asked_at[0] > _SAME_REQUEST_SECONDS:
            raise SecondSignalError(number)

    before = {number: signal.signal(number, hand_on) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nobody() -> None: ...


def _take(number: int, frame: Any) -> None:
    now = time.monotonic()
    if _REQUESTS.by is not None:
        if _REQUESTS.second_ends and now - _REQUESTS.at > _SAME_REQUEST_SECONDS:
            os._exit(128 + number)
        return
    _REQUESTS.by, _REQUESTS.at = signal.Signals(number).name, now
    if _REQUESTS.hand_to is None:
        LOGGER.error("Stopped by %s before the first step", _REQUESTS.by)
        # not by an exception: one that breaks into an import may leave a library half made
        os._exit(ExitCode.PREEMPTED)
    _REQUESTS.hand_to()
