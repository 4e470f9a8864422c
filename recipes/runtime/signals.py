"""SIGTERM, SIGUSR1 and Ctrl-C request a save and a stop after the current step; a second one ends the process at once.

Python handles a signal between two operations of the main thread, and the main thread may be inside one that never
ends: a collective without its peers, a queue without its loader. The signal's number is therefore also written to a
pipe, which a thread reads. It gives up where the main thread is known to wait (`waiting`) and stays there for long.
"""

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.failure import Failure, get_error_file, write_failure
from recipes.runtime.world import global_rank, started_by

LOGGER = logging.getLogger("lightning_recipes")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# a cluster may signal a process directly and again through its parent: within this time both count as one request
_SAME_REQUEST_SECONDS = 1.0
_SAME_INTERRUPT_SECONDS = 0.2  # the same for Ctrl-C, which a person presses again soon
WAIT_SECONDS = 120.0  # after a signal, for what the main thread waits for to arrive: the run can then still save
_START_SECONDS = 5.0  # the same before the first step, when there is nothing to save
_INTERRUPT_SECONDS = 5.0  # after Ctrl-C before training, for a waiting main thread to react
_NOT_SAVED = "not saved; to resume from the newest checkpoint: resume=auto"
NOT_STARTED = "Stopped by {} before the first step; to start again: the same command"
_IS_ENDING = "Ctrl-C: the run is ending already; Ctrl-C again ends it at once"
_LEAVE_BAR = "\n\x1b[?25h"  # below a progress bar, which hides the cursor
# what a second request does: `ignore` where the parent ends the process, `raise` KeyboardInterrupt after Ctrl-C where a
# program goes on after the run
OnSecond = Literal["exit", "ignore", "raise"]
_ANNOUNCE_SECONDS = 5.0  # of waiting, until it is logged
_POLL_SECONDS = 0.1


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


class _StopWaiting(BaseException):
    """Raised in the main thread once it has waited too long after a signal, if it need not agree with other ranks."""


@dataclass(frozen=True)
class _Wait:
    what: str
    exit_code: int
    outcome: str
    is_for_data: bool
    since: float


class _StopRequest:
    """Stop request of this process, global like the signal handlers that record it."""

    def __init__(self) -> None:
        self.wait: _Wait | None = None  # what the main thread waits for
        self.is_stoppable = False  # whether it handles `_StopWaiting` there
        self.stop_waiting: Callable[[], None] | None = None  # None if the ranks must agree to stop
        self.gives_up_at: float | None = None  # when the thread has made the main thread raise `_StopWaiting`
        self.wait_seconds = WAIT_SECONDS
        self.has_stepped = False
        self.interrupt_is_seen = False  # whether the main thread has handled SIGINT
        self.arrived: dict[int, float] = {}  # number of each signal that the thread has read -> time
        self.pipe: tuple[int, int] | None = None
        self.by: str | None = None  # name of the signal; None if none was received yet
        self.time = 0.0
        self.handler: Callable[[], None] | None = None  # None before training
        self.announcement = _IS_ENDING  # logged at Ctrl-C
        self.on_second: OnSecond = "exit"
        self.is_of_run = False  # whether a run in this process listens, and forgets the request when it ends


_REQUEST = _StopRequest()


def listen(*, on_second: OnSecond) -> None:
    """Handle the signals from now on. Until training sets a handler, the first signal ends the process.

    Args:
        on_second: What a second request to stop does.
    """
    _REQUEST.by, _REQUEST.handler, _REQUEST.on_second = None, None, on_second
    _REQUEST.wait, _REQUEST.stop_waiting, _REQUEST.interrupt_is_seen, _REQUEST.arrived = None, None, False, {}
    _REQUEST.gives_up_at, _REQUEST.wait_seconds, _REQUEST.has_stepped = None, WAIT_SECONDS, False
    for number in SIGNALS:
        # Ctrl-C stays ignored in the background of a shell, and stays with a program that handles it itself
        if number != signal.SIGINT or signal.getsignal(number) is signal.default_int_handler:
            signal.signal(number, _on_signal)
    if _REQUEST.pipe is None:
        _REQUEST.pipe = os.pipe()
        os.set_blocking(_REQUEST.pipe[1], False)
        threading.Thread(target=_watch, args=_REQUEST.pipe[:1], name="signals", daemon=True).start()
    signal.set_wakeup_fd(_REQUEST.pipe[1], warn_on_full_buffer=False)
    # the parent blocks the signals while it starts this process, which inherits the mask
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextlib.contextmanager
def listening(*, on_second: OnSecond = "exit") -> Iterator[None]:
    """Listen while a run is built, executed and finished in this process; restore the handlers afterwards.

    Args:
        on_second: What a second request to stop does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    handlers_before = {number: signal.getsignal(number) for number in SIGNALS}
    listen(on_second=on_second)
    _REQUEST.is_of_run = True
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        _REQUEST.is_of_run = False
        _REQUEST.arrived, _REQUEST.by = {}, None  # of this run: another one in this process is not asked to stop
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


def set_handler(
    handler: Callable[[], None] | None,
    *,
    stop_waiting: Callable[[], None] | None = None,
    wait_seconds: float | None = None,
    announcement: str = _IS_ENDING,
) -> None:
    """Set the handler of a stop request; call it at once if there has already been a request.

    Args:
        handler: Called in the main thread; None ignores requests, because the run is already ending.
        stop_waiting: Called where the main thread has waited for data for too long, and raises `Preempted`; None ends
            the process there.
        wait_seconds: Seconds after a request until a wait without progress is given up; None leaves them as they are.
        announcement: What Ctrl-C does now, logged as soon as it is pressed: a step may take a minute.
    """
    _REQUEST.announcement = announcement
    _REQUEST.handler = handler if handler is not None else _ignore
    _REQUEST.stop_waiting = stop_waiting
    if wait_seconds is not None:
        _REQUEST.wait_seconds = wait_seconds
    if handler is not None and _REQUEST.by is not None:
        handler()


def mark_step() -> None:
    """Note that this process has completed a step: from now on, a wait is worth the grace time of a signal."""
    _REQUEST.has_stepped = True


@contextlib.contextmanager
def waiting(
    what: str,
    *,
    exit_code: int = ExitCode.TERMINATED,
    outcome: str = _NOT_SAVED,
    announce: Callable[[], str] | None = None,
    stops: bool = False,
) -> Iterator[None]:
    """Mark that the main thread waits for something that may never come.

    A signal alone does not end the wait: what is waited for mostly arrives, and the run then saves. It is given up
    after `wait_seconds` without progress. Nothing here looks for dead loader processes: torch does every five seconds.

    Args:
        what: What it waits for, for the log.
        exit_code: Exit code of a process that a signal ends here.
        outcome: What is then left of the run, for the log.
        announce: Returns a line to log after 5 s of waiting, such as for whom; None logs none.
        stops: Whether this is a wait for data, where the run may stop between two operations of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer, timer = _REQUEST.wait, None
    if announce is not None:
        timer = threading.Timer(_ANNOUNCE_SECONDS, lambda: LOGGER.warning("%s", announce()))
        timer.daemon = True
        timer.start()
    try:
        _REQUEST.wait = _Wait(what, exit_code, outcome, stops, time.monotonic())
        _REQUEST.is_stoppable = stops
        yield
        _REQUEST.is_stoppable = False
    except _StopWaiting:
        _REQUEST.is_stoppable, _REQUEST.wait = False, None
        assert _REQUEST.stop_waiting is not None, "raised only if it is set"
        _REQUEST.stop_waiting()
    finally:
        _REQUEST.wait, _REQUEST.is_stoppable = outer, False
        if timer is not None:
            timer.cancel()


def was_requested() -> bool:
    """Return whether a signal has requested this process to stop."""
    return _REQUEST.by is not None


def requested_by() -> str:
    """Return the name of the signal that requested the stop."""
    return _REQUEST.by or "a signal to another rank"


def shown_name(by: str) -> str:
    """Return the name of a signal as a person knows it."""
    return "Ctrl-C" if by == signal.SIGINT.name else by


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
            _REQUEST.by, _REQUEST.time = signal.Signals(number).name, requested_at
            forward(number)
        elif time.monotonic() - requested_at > _same_request_seconds(number):
            raise SecondSignalError(number)

    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers_before = {number: signal.signal(number, on_signal) for number in heard}
    pipe_before = signal.set_wakeup_fd(-1)  # the main thread waits for processes, in a loop of its own
    try:
        yield
    finally:
        signal.set_wakeup_fd(pipe_before, warn_on_full_buffer=False)
        if not _REQUEST.is_of_run:  # of a sweep: a run in this process is not asked to stop
            _REQUEST.by = None
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


def _ignore() -> None: ...


def _forget_pipe() -> None:
    """In a forked process, which has no such thread, do not write to the pipe of its parent."""
    _REQUEST.pipe = None
    with contextlib.suppress(ValueError):  # not the main thread
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_pipe)


def _same_request_seconds(number: int) -> float:
    return min(_SAME_INTERRUPT_SECONDS, _SAME_REQUEST_SECONDS) if number == signal.SIGINT else _SAME_REQUEST_SECONDS


def _watch(pipe: int) -> None:
    """Read signal numbers, and end the process if the main thread does not handle one in time."""
    while True:
        ready, _, _ = select.select([pipe], [], [], _POLL_SECONDS if _REQUEST.arrived else None)
        now = time.monotonic()
        for number in os.read(pipe, 64) if ready else b"":
            if number not in SIGNALS:
                continue
            is_second = now - min(_REQUEST.arrived.values(), default=now) > _same_request_seconds(number)
            if is_second and not _is_own(now):
                _end_at_second(number)
            is_first = not _REQUEST.arrived
            _REQUEST.arrived.setdefault(number, now)
            if number == signal.SIGINT and is_first and _REQUEST.handler is not None:
                LOGGER.info(_REQUEST.announcement)
        _end_if_stuck(now)


def _end_at_second(number: int) -> None:
    if number != signal.SIGINT:
        if _REQUEST.on_second != "ignore":
            _exit(128 + number)
    # before training, the first Ctrl-C ends the run as soon as the main thread has seen it
    elif _REQUEST.on_second == "exit" and (_REQUEST.handler is not None or not _REQUEST.interrupt_is_seen):
        line = f"Interrupted, {_NOT_SAVED}" if _REQUEST.has_stepped else NOT_STARTED.format("Ctrl-C")
        _end(line, ExitCode.INTERRUPTED)


def _end_if_stuck(now: float) -> None:
    arrived, wait = dict(_REQUEST.arrived), _REQUEST.wait
    if not arrived:
        return
    number, requested_at = min(arrived.items(), key=lambda item: item[1])
    by, is_interrupt = shown_name(signal.Signals(number).name), number == signal.SIGINT
    if is_interrupt and _REQUEST.interrupt_is_seen:
        return
    if not is_interrupt and _REQUEST.handler is None and now - requested_at > _SAME_REQUEST_SECONDS:
        _end(NOT_STARTED.format(by), ExitCode.PREEMPTED)
    if wait is None:
        return
    is_start = wait.is_for_data and not _REQUEST.has_stepped
    wait_seconds = _START_SECONDS if is_start else _REQUEST.wait_seconds
    if is_interrupt and _REQUEST.handler is None:
        wait_seconds = _INTERRUPT_SECONDS
    if now - max(requested_at, wait.since) <= wait_seconds:
        return
    can_stop = _REQUEST.is_stoppable and _REQUEST.stop_waiting is not None and not is_start
    if is_interrupt and _REQUEST.on_second == "raise" and not can_stop:
        return  # a program goes on after this run
    if is_interrupt and _REQUEST.handler is None:
        _end("Interrupted", ExitCode.INTERRUPTED)
    if is_start:
        _end(NOT_STARTED.format(by), ExitCode.PREEMPTED)
    gives_up_at = _REQUEST.gives_up_at
    if gives_up_at is not None and gives_up_at >= wait.since:
        # the main thread is on its way out of this wait: it is no longer stoppable once its handler has raised, and
        # the signal by which it was interrupted has also woken this thread
        if now - gives_up_at <= _START_SECONDS:
            return
    elif can_stop:
        _REQUEST.gives_up_at = now
        # also interrupts a system call; the handler raises `_StopWaiting`
        signal.pthread_kill(threading.main_thread().ident or 0, number)
        return
    is_unsaved = wait.exit_code == ExitCode.TERMINATED
    exit_code = ExitCode.INTERRUPTED if is_interrupt and is_unsaved else wait.exit_code
    _end(f"Stopped by {by} while waiting for {wait.what}, {wait.outcome}", exit_code)


def _is_own(now: float) -> bool:
    """Return whether a signal that arrives now is the one by which the thread interrupts the main thread."""
    return _REQUEST.gives_up_at is not None and now - _REQUEST.gives_up_at <= _SAME_REQUEST_SECONDS


def _end(line: str, exit_code: int) -> NoReturn:
    LOGGER.error(line)
    file = get_error_file()
    if file is not None and started_by() == "spawn" and global_rank() > 0:  # its lines do not reach the console
        write_failure(Failure(exit_code=exit_code, message=line, report=line, time=time.time()), file)
    _exit(exit_code)


def _exit(exit_code: int) -> NoReturn:
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _LEAVE_BAR.encode())
    os._exit(exit_code)


def _on_signal(number: int, frame: Any) -> None:
    now = time.monotonic()
    if _is_own(now):
        wait, gives_up_at = _REQUEST.wait, _REQUEST.gives_up_at
        is_same = wait is not None and gives_up_at is not None and wait.since < gives_up_at
        if is_same and _REQUEST.is_stoppable and _REQUEST.stop_waiting is not None:
            _REQUEST.is_stoppable = False
            raise _StopWaiting
        return
    if _REQUEST.by is not None:
        if now - _REQUEST.time <= _same_request_seconds(number):
            return
        if number == signal.SIGINT and _REQUEST.on_second == "raise":
            signal.default_int_handler(number, frame)
        if number != signal.SIGINT and _REQUEST.on_second != "ignore":
            _exit(128 + number)
        return  # a second Ctrl-C ends the process in the thread that reads the pipe, with a line
    if number == signal.SIGINT and _REQUEST.handler is None:
        _REQUEST.interrupt_is_seen = True
        signal.default_int_handler(number, frame)
    _REQUEST.by, _REQUEST.time = signal.Signals(number).name, now
    if _REQUEST.handler is None:
        LOGGER.error(NOT_STARTED.format(_REQUEST.by))
        # not by an exception: raised in the middle of an import, it may leave a library half initialized
        os._exit(ExitCode.PREEMPTED)
    _REQUEST.handler()
