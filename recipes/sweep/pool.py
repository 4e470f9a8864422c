"""Run the jobs of a sweep: start, monitor and record them; a failed job does not stop the others."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from recipes.files import tolerating
from recipes.launcher import Handle, Launcher
from recipes.launcher.job import Job, State, state_from_exit_code
from recipes.runtime.console import LOGGER
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.signals import SecondSignalError, forward_signals_to
from recipes.sweep.progress import Progress

_POLL_SECONDS = 0.05
_READ_SECONDS = 0.5
_GRACE_SECONDS = 15.0  # for a job to stop after an error here: longer than the job gives its own ranks


class Source(Protocol):
    """Supplies the jobs of a sweep: a grid, or a study that learns from their results."""

    def next_jobs(self) -> Sequence[Job]:
        """Return the next jobs; called while there is room. Empty means none until another job has ended."""
        ...

    def job_ended(self, job: Job) -> None:
        """Handle the end of a job, whose state is final."""
        ...

    def should_prune(self, job: Job, rows: Sequence[Mapping[str, float]]) -> bool:
        """Return whether to stop a running job early.

        Args:
            job: The job.
            rows: The rows of `metrics.csv` since the last call; the newest one may come twice.
        """
        ...


class Pool:
    """The running and waiting jobs of one sweep.

    Args:
        launcher: Starts the jobs.
        source: Supplies the jobs.
        on_change: Called when a job has started, ended, or changed its place in a cluster's queue.
        show: Called at every poll with the progress of the jobs started so far, by job number.
    """

    def __init__(
        self,
        launcher: Launcher,
        source: Source,
        *,
        on_change: Callable[[Job], None],
        show: Callable[[Mapping[int, Progress]], None],
    ) -> None:
        self._launcher = launcher
        self._source = source
        self._on_change = on_change
        self._show = show
        self._waiting: list[Job] = []
        # by job number
        self._running: dict[int, Handle] = {}
        self._progress: dict[int, Progress] = {}
        self._started_at: dict[int, float] = {}
        self._pruned: set[int] = set()
        self._signals: list[int] = []  # received requests to stop
        self._last_read = 0.0
        self._is_exhausted = False  # the source has no job until another one has ended
        self._is_unwritable = False  # a job could not be saved: the source is not asked again

    def run(self) -> int | None:
        """Run until all jobs have ended or a signal has stopped them.

        Returns:
            The number of the signal, Ctrl-C included, that asked to save and stop; None if there was none.
        """
        try:
            with forward_signals_to(self._forward):
                self._loop()
        except SecondSignalError as second:
            LOGGER.error("Terminated by a second signal")
            return second.number
        except Exception:
            self._stop(signal.SIGTERM)  # an error in this process must not cost the jobs their progress
            raise
        finally:
            for handle in self._running.values():
                handle.kill()
            self._collect_ended(stopped=True)
        return self._signals[0] if self._signals else None

    def _loop(self) -> None:
        while True:
            self._collect_ended()
            if not self._signals:
                self._start_jobs()
            self._read_progress()
            self._show(self._progress)
            all_started = self._is_exhausted and not self._waiting
            if not self._running and (self._signals or all_started):
                return
            time.sleep(_POLL_SECONDS)

    def _refill(self) -> bool:
        """Fetch jobs from the source; return whether there were any."""
        if self._is_exhausted:
            return False
        jobs = self._source.next_jobs()
        for job in jobs:
            if save(job):  # the job's process reads its config from this file
                self._waiting.append(job)
                continue
            self._is_unwritable = True
            job.state, job.exit_code = State.UNSAVED, ExitCode.UNSAVED
            LOGGER.error(
                f"job {job.number} is not started: {job.file} could not be written; the same command starts it"
            )
            self._source.job_ended(job)
        self._is_exhausted = not jobs or self._is_unwritable
        return bool(self._waiting)

    def _start_jobs(self) -> None:
        while not self._launcher.is_full():
            if not self._waiting and not self._refill():
                return
            handles = self._launcher.start(self._waiting)
            for handle in handles:
                self._add_running(handle)
            if not handles:  # a job that needs more devices than are free
                return

    def _add_running(self, handle: Handle) -> None:
        job = handle.job
        assert job.composed is not None, f"job {job.number} was started without a config"
        self._waiting.remove(job)
        self._running[job.number] = handle
        has_steps = job.composed.mode.trains and job.composed.epochs is None
        max_steps = job.composed.max_steps if has_steps else None
        self._progress[job.number] = Progress(job.folder, max_steps)
        self._started_at[job.number] = time.monotonic()
        job.state, job.exit_code, job.seconds = _current_state(handle), None, None
        save(job)
        self._on_change(job)
        for number in self._signals:  # a signal may arrive while the launcher starts jobs
            handle.send_signal(number)

    def _collect_ended(self, *, stopped: bool = False) -> None:
        """Record the jobs that have ended.

        Args:
            stopped: Whether this process has ended them: what a signal killed then counts as interrupted.
        """
        for number, handle in list(self._running.items()):
            exit_code = handle.poll()
            if exit_code is None:
                continue
            del self._running[number]
            self._is_exhausted = self._is_unwritable  # a study may have a new proposal now
            job = handle.job
            self._progress[number].read()
            job.exit_code = exit_code
            job.seconds = round(time.monotonic() - self._started_at[number], 3)
            job.state = state_from_exit_code(exit_code)
            # a pruned job that finished before the signal arrived keeps its result
            if number in self._pruned and job.state is not State.FINISHED:
                job.state = State.PRUNED
            elif (stopped and job.state not in (State.FINISHED, State.PREEMPTED)) or (
                self._signals and job.state is State.KILLED  # by the cluster that was asked to cancel it
            ):
                job.state = State.INTERRUPTED
            save(job)
            self._source.job_ended(job)
            self._on_change(job)

    def _read_progress(self) -> None:
        if time.monotonic() - self._last_read < _READ_SECONDS:
            return
        self._last_read = time.monotonic()
        for number, handle in self._running.items():
            job = handle.job
            if (state := _current_state(handle)) is not job.state:
                job.state = state  # a cluster has started the job, or queued it again
                save(job)
                self._on_change(job)
            rows = self._progress[number].read()
            if rows and number not in self._pruned and self._source.should_prune(job, rows):
                self._pruned.add(number)
                handle.send_signal(signal.SIGTERM)

    def _forward(self, number: int) -> None:
        """Forward a signal to all running jobs; no further job starts."""
        self._signals.append(number)
        if number == signal.SIGINT:
            LOGGER.info("Ctrl-C: running jobs finish their step and save; Ctrl-C again ends them at once")
        for handle in self._running.values():
            handle.send_signal(number)

    def _stop(self, number: int) -> None:
        """Send a signal to all jobs and wait for their end, at most `_GRACE_SECONDS`."""
        for handle in self._running.values():
            handle.send_signal(number)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline:
            self._collect_ended(stopped=True)
            if not self._running:
                return
            time.sleep(_POLL_SECONDS)


def worst_exit_code(jobs: Sequence[Job], number: int) -> int:
    """Return the exit code of a sweep stopped by a signal: 75 if no job lost progress, else 143, or 130 for Ctrl-C."""
    unsaved = (State.INTERRUPTED, State.KILLED, State.RUNNING)
    lost = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED
    return lost if any(job.state in unsaved for job in jobs) else ExitCode.PREEMPTED


def save(job: Job) -> bool:
    """Write `job.json` and return whether that succeeded; on a full disk the running jobs go on."""
    with tolerating(job.file):
        job.save()
        return True
    return False


def _current_state(handle: Handle) -> State:
    return State.QUEUED if handle.is_waiting() else State.RUNNING
