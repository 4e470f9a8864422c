"""Carries the jobs of a sweep out: starts, watches, records; one that fails does not stop the others."""

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from recipes.launcher import Handle, Launcher
from recipes.launcher.job import Job, State, state_from_exit_code
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.signals import SecondSignalError, forward_signals_to
from recipes.sweep.progress import Progress

LOGGER = logging.getLogger("lightning_recipes")
_POLL_SECONDS = 0.05
_READ_SECONDS = 0.5
_INTERRUPTED_SECONDS = 15.0  # for a job to end by itself: longer than it gives its ranks


class Source(Protocol):
    """Where jobs come from."""

    def more(self) -> Sequence[Job]:
        """The next ones, asked for while there is room; none: there are none now."""
        ...

    def ended(self, job: Job) -> None:
        """Take in how a job has ended."""
        ...

    def should_prune(self, job: Job, rows: Sequence[Mapping[str, float]]) -> bool:
        """Whether a job that has logged these rows, some of them told before, is not worth going on with."""
        ...


class Pool:
    """One sweep's jobs in one place.

    Args:
        place: Where they run.
        source: Where they come from.
        tell: Called whenever a job has begun or ended.
        show: Called often, with how far those that run are.
    """

    def __init__(
        self,
        place: Launcher,
        source: Source,
        *,
        tell: Callable[[Job], None],
        show: Callable[[Mapping[int, Progress]], None],
    ) -> None:
        self._launcher = place
        self._source = source
        self._tell = tell
        self._show = show
        self._waiting: list[Job] = []
        self._running: dict[int, Handle] = {}
        self._progress: dict[int, Progress] = {}
        self._began: dict[int, float] = {}
        self._hopeless: set[int] = set()
        self._asked: list[int] = []  # signals that ask to stop
        self._read_at = 0.0
        self._is_dry = False  # nothing more to start until a job has ended

    def run(self) -> int | None:
        """Until all jobs have ended, or a signal has stopped them.

        Returns:
            The number of the signal that asked to save and stop; None: there was none.

        Raises:
            KeyboardInterrupt: Ctrl-C; all jobs have ended.
        """
        try:
            with forward_signals_to(self._ask_all):
                self._run()
        except KeyboardInterrupt:
            self._interrupt()
            raise
        except SecondSignalError as second:
            LOGGER.error("Terminated by a second signal")
            return second.number
        except Exception:
            self._stop(signal.SIGTERM)  # a fault of ours: the jobs save
            raise
        finally:
            for handle in self._running.values():
                handle.kill()
            self._take_ended(stopped=True)
        return self._asked[0] if self._asked else None

    def _run(self) -> None:
        while True:
            self._take_ended()
            if not self._asked:
                self._start()
            self._read()
            self._show(self._progress)
            if not self._running and (self._asked or (self._is_dry and not self._waiting)):
                return
            time.sleep(_POLL_SECONDS)

    def _refill(self) -> bool:
        if self._is_dry:
            return False
        more = self._source.more()
        self._is_dry = not more
        for job in more:
            job.save()  # which is what its process starts from
        self._waiting += more
        return bool(more)

    def _start(self) -> None:
        while not self._launcher.is_full():
            if not self._waiting and not self._refill():
                return
            started = self._launcher.start(self._waiting)
            for handle in started:
                self._begin(handle)
            if not started:
                return

    def _begin(self, handle: Handle) -> None:
        job = handle.job
        assert job.composed is not None
        self._waiting.remove(job)
        self._running[job.number] = handle
        max_steps = job.composed.config["trainer"]["max_steps"]
        self._progress[job.number] = Progress(job.folder, max_steps)
        self._began[job.number] = time.monotonic()
        job.state, job.exit_code, job.seconds = _state_of(handle), None, None
        _keep(job)
        self._tell(job)
        for number in self._asked:
            handle.send_signal(number)

    def _take_ended(self, *, stopped: bool = False) -> None:
        for number, handle in list(self._running.items()):
            exit_code = handle.poll()
            if exit_code is None:
                continue
            del self._running[number]
            self._is_dry = False
            job = handle.job
            self._progress[number].read()
            job.exit_code = exit_code
            job.seconds = round(time.monotonic() - self._began[number], 3)
            job.state = state_from_exit_code(exit_code)
            if number in self._hopeless and job.state is not State.FINISHED:
                job.state = State.PRUNED
            elif stopped and job.state not in (State.FINISHED, State.PREEMPTED):
                job.state = State.INTERRUPTED
            _keep(job)
            self._source.ended(job)
            self._tell(job)

    def _read(self) -> None:
        if time.monotonic() - self._read_at < _READ_SECONDS:
            return
        self._read_at = time.monotonic()
        for number, handle in self._running.items():
            if (state := _state_of(handle)) is not handle.job.state:
                handle.job.state = state  # of a cluster's: it has begun, or waits again
                _keep(handle.job)
                self._tell(handle.job)
            rows = self._progress[number].read()
            if (
                rows
                and number not in self._hopeless
                and self._source.should_prune(handle.job, rows)
            ):
                self._hopeless.add(number)
                handle.send_signal(signal.SIGINT)  # without a checkpoint: it is not to go on

    def _ask_all(self, number: int) -> None:
        self._asked.append(number)
        for handle in self._running.values():
            handle.send_signal(number)

    def _interrupt(self) -> None:
        """Hand Ctrl-C to all jobs and give them time; a second one kills them."""
        try:
            self._stop(signal.SIGINT)
        except KeyboardInterrupt:
            LOGGER.error("Interrupted again; what still runs is killed")

    def _stop(self, number: int) -> None:
        for handle in self._running.values():
            handle.send_signal(number)
        until = time.monotonic() + _INTERRUPTED_SECONDS
        while time.monotonic() < until:
            self._take_ended(stopped=True)
            if not self._running:
                return
            time.sleep(_POLL_SECONDS)


def _keep(job: Job) -> None:
    """On the disk, if it takes it: the jobs themselves outlive a full one."""
    try:
        job.save()
    except OSError as error:
        LOGGER.error(f"{job.file} cannot be written now: {error.strerror}")


def _state_of(handle: Handle) -> State:
    return State.QUEUED if handle.is_waiting() else State.RUNNING


def worst_exit_code(jobs: Sequence[Job]) -> int:
    """Of a sweep that a signal has stopped: whether nothing is lost."""
    lost = (State.INTERRUPTED, State.KILLED, State.RUNNING)
    return ExitCode.TERMINATED if any(job.state in lost for job in jobs) else ExitCode.PREEMPTED
