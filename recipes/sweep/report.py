"""What is told of a sweep: lines, `sweep.csv`, the page. None of it may stop a job, so a full disk is one line more."""

import time
from collections.abc import Sequence
from pathlib import Path

from recipes.launcher.job import Job, State
from recipes.runtime.console import LOGGER
from recipes.sweep.command_line import command_of, resume_command
from recipes.sweep.leaderboard import (
    SWEEP_FILE,
    ranked,
    read_objective,
    swept_words,
    write_leaderboard,
)
from recipes.sweep.live_table import time_text
from recipes.sweep.settings import Settings

PAGE = "report.html"
_PAGE_SECONDS = 60.0  # between two: 3 s for 300 runs, in which no job is looked after
_TAIL_LINES = 6
_OF_SRUN = ("srun: ", "slurmstepd: ")  # which only say that the ranks have ended


class Records:
    """Of one sweep.

    Args:
        folder: Of the sweep.
        jobs: All there are; the list may grow.
        settings: What the best is best in, and who compares.
        keys: What is swept over.
        typed: The words of the command, to say how it goes on.
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
        self._page_at = float("-inf")
        self._said: set[str] = set()

    def swept(self) -> dict[int, dict[str, str]]:
        """By job number, the words that set it apart."""
        return swept_words(self._jobs, self._keys)

    def tell(self, job: Job, log: Path) -> None:
        """A line on a job that has begun or ended, with its last words where it has failed; and the files."""
        words = self.swept()[job.number]
        said = " ".join(f"{key}={value}" for key, value in words.items())
        if job.state in (State.QUEUED, State.RUNNING):
            does = "started" if job.state is State.RUNNING else f"queued as {job.cluster_job}"
            LOGGER.info(f"job {job.number} {does}: {said}".removesuffix(": "))
        else:
            taken = "" if job.seconds is None else f", {time_text(job.seconds)}"
            told = (
                f"job {job.number} {str(job.state).replace('_', ' ')}: {self._judged(job)}{taken}"
            )
            LOGGER.info(f"{told}, {job.folder}")
            if not job.state.is_over:
                LOGGER.error(_tail(log))
        self.write(with_page=job.exit_code is not None)

    def write(self, *, with_page: bool, now: bool = False) -> None:
        """The leaderboard, and the page where there is something to compare, once a minute at most.

        Args:
            with_page: Whether there may be something new on it.
            now: Whether the minute is not waited for.
        """
        settings, folder = self._settings, self._folder
        objective, direction = settings.objective, settings.direction
        try:
            write_leaderboard(
                folder, self._jobs, keys=self._keys, objective=objective, direction=direction
            )
        except OSError as error:
            self._say_once(f"{SWEEP_FILE} cannot be written now: {error.strerror}")
        if with_page and (now or time.monotonic() - self._page_at > _PAGE_SECONDS):
            self._page_at = time.monotonic()
            self._compare()

    def say_end(self) -> None:
        """What has become of all jobs, the best one, and how to go on."""
        self.write(with_page=True, now=True)
        counts = {state: sum(job.state is state for job in self._jobs) for state in State}
        told = ", ".join(
            f"{count} {str(state).replace('_', ' ')}" for state, count in counts.items() if count
        )
        LOGGER.info(f"Sweep: {told}; {self._folder / SWEEP_FILE}")
        for job in ranked(self._jobs, self._settings.objective, self._settings.direction)[:1]:
            if job.state is State.FINISHED and self._value(job) is not None:
                LOGGER.info(
                    f"Best: job {job.number}, {self._judged(job)}: {command_of(job.overrides)}"
                )
        if any(not job.state.is_over and not job.state.has_failed for job in self._jobs):
            LOGGER.info(f"To go on: {resume_command(self._typed, self._folder)}")

    def _compare(self) -> None:
        """A page without the number that it is sorted by cannot be."""
        settings = self._settings
        over = [job for job in self._jobs if job.exit_code is not None]
        folders = [job.folder for job in over if (job.folder / "config.yaml").is_file()]
        if settings.compare is None or all(self._value(job) is None for job in over):
            return
        path = self._folder / PAGE
        try:
            settings.compare(folders, path, sort=settings.objective, dashboard=settings.dashboard)
        except Exception as error:  # said, and no reason to stop a job
            self._say_once(f"{PAGE} cannot be written now: {type(error).__name__}: {error}")

    def _value(self, job: Job) -> float | None:
        return read_objective(job.folder, self._settings.objective)

    def _judged(self, job: Job) -> str:
        value = self._value(job)
        if value is not None and not job.state.has_failed:
            return f"{self._settings.objective} {value:.6g}"
        if job.state is State.FINISHED:
            return f"no {self._settings.objective}"
        return f"exit code {job.exit_code}"

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            LOGGER.error(line)


def _tail(log: Path) -> str:
    """The last that a job has said."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    lines = [line for line in lines if line and not line.startswith(_OF_SRUN)]
    return "\n".join(f"  {line}" for line in [*lines[-_TAIL_LINES:], f"all of it: {log}"])
