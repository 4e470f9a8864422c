"""The records of a running sweep: log lines, `sweep.csv`, the comparison page. A full disk never stops a job."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from recipes.files import tolerating
from recipes.launcher.job import Job, State
from recipes.run_folder import CONFIG_FILE, PAGE_FILE, SWEEP_FILE
from recipes.runtime.console import LOGGER
from recipes.sweep.command_line import resume_command, train_command
from recipes.sweep.leaderboard import (
    list_objectives,
    rank_jobs,
    read_objective,
    swept_overrides,
    write_leaderboard,
)
from recipes.sweep.live_table import format_seconds
from recipes.sweep.settings import Settings

_PAGE_SECONDS = 60.0  # at least, between two pages: one takes 3 s for 300 runs and blocks the pool
_TAIL_LINES = 6
_SRUN_PREFIXES = ("srun: ", "slurmstepd: ")  # these lines only say that the ranks have ended


class Report:
    """The records of one sweep.

    Args:
        folder: The sweep's folder.
        jobs: All jobs; the list may grow.
        settings: The settings of `sweep.*`.
        keys: The keys that are swept over.
        typed: The command line, for the printed command that resumes the sweep.
    """

    def __init__(
        self,
        folder: Path,
        jobs: Sequence[Job],
        *,
        settings: Settings,
        keys: Sequence[str],
        typed: Sequence[str],
    ) -> None:
        self._folder = folder
        self._jobs = jobs
        self._settings = settings
        self._keys = [key.lstrip("+") for key in keys]
        self._typed = typed
        self._page_written_at = float("-inf")
        self._logged_errors: set[str] = set()

    def swept_values(self) -> dict[int, dict[str, str]]:
        """Return the swept overrides of each job, by job number."""
        return swept_overrides(self._jobs, self._keys)

    def log_job(self, job: Job, log: Path) -> None:
        """Log that a job has started or ended and update the files; quote the log of one without a result.

        Args:
            job: The job.
            log: Its log file.
        """
        if job.state in (State.QUEUED, State.RUNNING):
            event = "started" if job.state is State.RUNNING else f"queued as {job.cluster_job}"
            values = self.swept_values()[job.number]
            shown = " ".join(f"{key}={value}" for key, value in values.items())
            LOGGER.info(f"job {job.number} {event}: {shown}".removesuffix(": "))
        else:
            duration = "" if job.seconds is None else f", {format_seconds(job.seconds)}"
            outcome = f"{_plain(job.state)}: {self._result(job)}{duration}"
            LOGGER.info(f"job {job.number} {outcome}, {job.folder}")
            if not job.state.is_over:
                LOGGER.error(_tail(log))
            elif job.state is State.FINISHED and self._objective(job) is None:
                LOGGER.info(_tail(log, 1))  # what it did instead, or why it had nothing to do
        self.write(with_page=job.exit_code is not None)

    def write(self, *, with_page: bool, now: bool = False) -> None:
        """Write `sweep.csv`, and the page if there is something to compare, at most once a minute.

        Args:
            with_page: Whether the page may have changed.
            now: Write the page without waiting for the minute to pass.
        """
        settings = self._settings
        with tolerating(self._folder / SWEEP_FILE):
            write_leaderboard(
                self._folder,
                self._jobs,
                keys=self._keys,
                objective=settings.objective,
                direction=settings.direction,
            )
        if with_page and (now or time.monotonic() - self._page_written_at > _PAGE_SECONDS):
            self._page_written_at = time.monotonic()
            self._write_page()

    def log_end(self) -> None:
        """Log how many jobs ended in each state, the best job, and how to resume the sweep."""
        self.write(with_page=True, now=True)
        counts = Counter(job.state for job in self._jobs)
        summary = ", ".join(f"{counts[state]} {_plain(state)}" for state in State if counts[state])
        LOGGER.info(f"Sweep: {summary}; {self._folder / SWEEP_FILE}")
        for job in rank_jobs(self._jobs, self._settings.objective, self._settings.direction)[:1]:
            if job.state is State.FINISHED and self._objective(job) is not None:
                LOGGER.info(f"Best: job {job.number}, {self._result(job)}: {train_command(job.overrides)}")
        if any(not job.state.is_over and not job.state.has_failed for job in self._jobs):
            LOGGER.info(f"To resume: {resume_command(self._typed, self._folder)}")

    def _write_page(self) -> None:
        settings = self._settings
        ended = [job for job in self._jobs if job.exit_code is not None]
        folders = [job.folder for job in ended if (job.folder / CONFIG_FILE).is_file()]
        # the page is sorted by the objective, so at least one run must have it
        if settings.compare is None or all(self._objective(job) is None for job in ended):
            return
        path = self._folder / PAGE_FILE
        try:
            with tolerating(path):
                settings.compare(folders, path, sort=settings.objective, dashboard=settings.dashboard)
        except Exception as error:  # logged: a page must not stop the jobs
            self._log_error_once(f"Cannot write {PAGE_FILE}: {type(error).__name__}: {error}")

    def _objective(self, job: Job) -> float | None:
        return read_objective(job.folder, self._settings.objective)

    def _result(self, job: Job) -> str:
        """Return the objective of a job as text, or why there is none."""
        value = self._objective(job)
        if value is not None and not job.state.has_failed:
            return f"{self._settings.objective} {value:.6g}"
        if job.state is State.FINISHED:
            is_trained = read_objective(job.folder, "train_loss") is not None
            others = list_objectives(job.folder) or (["train_loss"] if is_trained else [])
            hint = f"; sweep.objective=<{' | '.join(others)}> ranks the runs" if others else ""
            return f"no {self._settings.objective}{hint}"
        return f"exit code {job.exit_code}"

    def _log_error_once(self, line: str) -> None:
        if line not in self._logged_errors:
            self._logged_errors.add(line)
            LOGGER.error(line)


def _plain(state: State) -> str:
    return str(state).replace("_", " ")


def _tail(log: Path, num_lines: int = _TAIL_LINES) -> str:
    """Return the last lines of a job's log."""
    lines = log.read_text(errors="replace", encoding="utf-8").splitlines() if log.is_file() else []
    lines = [line for line in lines if line and not line.startswith(_SRUN_PREFIXES)]
    return "\n".join(f"  {line}" for line in [*lines[-num_lines:], f"full log: {log}"])
