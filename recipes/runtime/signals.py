"""SIGTERM and SIGUSR1 request a save and a stop after the current step; a second signal ends the process at once."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from recipes.runtime.exit_codes import ExitCode

LOGGER = logging.getLogger("lightning_recipes")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# a cluster may signal a process directly and again through its parent: within this time both count as one request
_SAME_REQUEST_SECONDS = 1.0


class Preempted(BaseException):
    """A signal has ended the run.

    Args:
        by: Name of the signal.
        step: Optimizer steps completed.
        saved: Whether all of them are in a checkpoint.
    """

    def __init__(self, by: str, *, step: int, saved: bool) -> None:
        super().__init__(by)
        self.by = by
        self.step = step
        self.saved = saved


class SecondSignalError(BaseException):
    """A second stop request, raised in the main thread.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _StopRequest:
    """Stop request of this process, global like the signal handlers that record it."""

    def __init__(self) -> None:
        self.by: str | None = None  # name of the signal; None if none was received yet
        self.time = 0.0
        self.handler: Callable[[], None] | None = None  # None before training
        self.exits_on_second = True


_REQUEST = _StopRequest()


def listen(*, second_ends: bool) -> None:
    """Handle the signals from now on. Until training sets a handler, the first signal ends the process.

    Args:
        second_ends: Whether a second signal ends this process; False if its parent does that.
    """
    _REQUEST.by, _REQUEST.handler, _REQUEST.exits_on_second = None, None, second_ends
    for number in SIGNALS:
        signal.signal(number, _on_signal)
    # the parent blocks the signals while it starts this process, which inherits the mask
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Listen while a run is built, executed and finished in this process; restore the handlers afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    handlers_before = {number: signal.getsignal(number) for number in SIGNALS}
    listen(second_ends=True)
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


def set_handler(handler: Callable[[], None] | None) -> None:
    """Set the handler of a stop request; call it at once if there has already been a request.

    Args:
        handler: Called in the main thread; None ignores requests, because the run is already ending.
    """
    _REQUEST.handler = handler if handler is not None else _ignore
    if handler is not None and _REQUEST.by is not None:
        handler()


def was_requested() -> bool:
    """Return whether a signal has requested this process to stop."""
    return _REQUEST.by is not None


def requested_by() -> str:
    """Return the name of the signal that requested the stop."""
    return _REQUEST.by or "a signal to another rank"


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals within the context; processes started here block them until they `listen`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextlib.contextmanager
def forward_signals_to(forward: Callable[[int], None]) -> Iterator[None]:
    """Pass the first signal's number to `forward`, without a time limit for the worker processes.

    Raises:
        SecondSignalError: A second signal has arrived.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    requested_at: float | None = None

    def on_signal(number: int, _: object) -> None:
        nonlocal requested_at
        if requested_at is None:
            requested_at = time.monotonic()
            forward(number)
        elif time.monotonic() - requested_at > _SAME_REQUEST_SECONDS:
            raise SecondSignalError(number)

    handlers_before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


def _ignore() -> None: ...


def _on_signal(number: int, _: object) -> None:
    now = time.monotonic()
    if _REQUEST.by is not None:
        if _REQUEST.exits_on_second and now - _REQUEST.time > _SAME_REQUEST_SECONDS:
            os._exit(128 + number)
        return
    _REQUEST.by, _REQUEST.time = signal.Signals(number).name, now
    if _REQUEST.handler is None:
        LOGGER.error("Stopped by %s before the first step", _REQUEST.by)
        # not by an exception: raised in the middle of an import, it may leave a library half initialized
        os._exit(ExitCode.PREEMPTED)
    _REQUEST.handler()
