"""One sweep: its folder and its jobs, which are all composed and checked before the first one starts."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from recipes.checkpoint.resume import newest_checkpoint
from recipes.config.search_path import select_search_path
from recipes.errors import ConfigError
from recipes.launcher import Launcher
from recipes.launcher.composed_job import compose_job
from recipes.launcher.job import JOB_FILE, Job, State, read_job
from recipes.run_folder import has_run
from recipes.runtime.console import LOGGER
from recipes.runtime.exit_codes import ExitCode
from recipes.sweep.command_line import job_overrides, resume_command
from recipes.sweep.live_table import LiveTable
from recipes.sweep.pool import Pool, Source, save, worst_exit_code
from recipes.sweep.report import Report
from recipes.sweep.settings import Settings

_MAX_DEPTH = 2  # levels of job folders below the sweep's


class Sweep:
    """The jobs of one sweep folder.

    Args:
        folder: The sweep's folder.
        launcher: Starts the jobs.
        settings: The settings of `sweep.*`.
        config_folder: The folder from which jobs are composed.
        config_name: The primary config.
        keys: The keys that are swept over.
        typed: The command line, for the printed command that resumes the sweep.
    """

    def __init__(
        self,
        *,
        folder: Path,
        launcher: Launcher,
        settings: Settings,
        config_folder: Path,
        config_name: str,
        keys: Sequence[str],
        typed: Sequence[str],
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.launcher = launcher
        self._source: dict[str, Any] = {"config_folder": config_folder, "config_name": config_name}
        self._typed = typed
        self._search_path = select_search_path(typed)  # Hydra gives no job its own settings
        self._ledger = Ledger(folder)
        self.rejected: list[int] = []  # numbers of the jobs whose config is invalid, as a retry leaves it
        self._requested: list[Job] = []  # by this command; the ledger also has earlier ones
        self._report = Report(folder, self._ledger.jobs, settings=settings, keys=keys, typed=typed)
        self._table = LiveTable(Console(), self._ledger.jobs, self._report.swept_values)

    @property
    def jobs(self) -> list[Job]:
        """All jobs of the folder, including those of earlier commands."""
        return self._ledger.jobs

    def prepare(
        self, overrides: Sequence[str], number: int, get_folder_name: Callable[[int], str]
    ) -> tuple[Job, list[ConfigError]]:
        """Find or create the job with these overrides.

        The config is composed and checked only if the job will start: the data of a finished one may be gone.

        Args:
            overrides: The job's overrides from Hydra's sweeper.
            number: The job's index in the sweep, used if the job is new and the number is free.
            get_folder_name: Returns the name of a job's folder from its number.

        Returns:
            The job, and all errors in its config.

        Raises:
            ConfigError: The job's folder would not be in the sweep's.
        """
        overrides = [*self._search_path, *job_overrides(overrides)]
        job = self._ledger.claim(overrides)
        if job is None:
            number, name = self._find_free(number, get_folder_name)
            _check_folder_name(name)
            job = Job(number=number, folder=self.folder / name, overrides=overrides)
            if owners := [other for other in self.jobs if other.folder == job.folder]:
                shared_folder = ConfigError(
                    f"hydra.sweep.subdir={job.folder.name}",
                    f"jobs {owners[0].number} and {number} would share this folder",
                    "no hydra.sweep.subdir, or one with ${hydra.job.num} in it",
                )
                return job, [shared_folder]
            if has_run(job.folder):
                of_other = ConfigError(
                    f"hydra.sweep.dir={self.folder}",
                    f"{job.folder} is of a run that no job of this sweep started: the job would continue it",
                    "hydra.sweep.dir=<another folder>",
                )
                return job, [of_other]
            self._ledger.add(job)
        self._requested.append(job)
        return job, self._compose(job) if self.should_start(job) else []

    def _find_free(self, wanted: int, get_folder_name: Callable[[int], str]) -> tuple[int, str]:
        """Return a number that no job has, and the name of its folder, where possible one that is of no other run."""
        number = self._ledger.free_number(wanted)
        while has_run(self.folder / get_folder_name(number)):
            if get_folder_name(number) == get_folder_name(number + 1):
                break  # named by something else than the number
            number = self._ledger.free_number(number + 1)
        return number, get_folder_name(number)

    def claim(self, overrides: Sequence[str]) -> None:
        """Mark the job of an earlier command as used, so that `prepare` does not return it."""
        self._ledger.claim([*self._search_path, *job_overrides(overrides)])

    def should_start(self, job: Job) -> bool:
        """Return whether a job has no result yet and may still get one."""
        if job.number in self.rejected or (job.state.has_failed and not self.settings.retry_failed):
            return False
        return not job.state.is_over

    def run(self, source: Source, *, results: Collection[State] = (State.FINISHED, State.PRUNED)) -> int:
        """Run the jobs of the source and return the exit code of the sweep: that of its worst job.

        Args:
            source: Supplies the jobs.
            results: Ends of a job that do not count as a failure of the sweep, if any of its jobs has finished.
        """
        self._report.write(with_page=False)
        if not self.launcher.waits:
            return self._submit(source)
        pool = Pool(self.launcher, source, on_change=self._log_job, show=self._table.show)
        stop_signal = None
        try:
            with self._table.updating():
                stop_signal = pool.run()
        finally:
            self._report.log_end()
        if stop_signal is not None:
            return worst_exit_code(self._requested, stop_signal)
        has_finished = any(job.state is State.FINISHED for job in self.jobs)
        failed = [job for job in self._requested if not (job.state.is_over or (has_finished and job.state in results))]
        codes = [job.exit_code for job in failed]
        return max((ExitCode.CRASHED if code is None or code < 0 else code for code in codes), default=0)

    def reject(self, job: Job, mistakes: Sequence[ConfigError]) -> None:
        """Record that a job's config is invalid."""
        job.state, job.exit_code = State.REFUSED, ExitCode.INVALID_CONFIG
        self.rejected.append(job.number)
        if job in self.jobs:  # else its folder is that of another job
            save(job)
        LOGGER.error(f"job {job.number} has an invalid config: {mistakes[0]}")
        self._report.write(with_page=False)

    def _compose(self, job: Job) -> list[ConfigError]:
        mistakes = compose_job(job, self.launcher, [*job.overrides, *_resume_override(job)], **self._source)
        if job.composed is not None and newest_checkpoint(job.folder) is not None and _trains(job):
            # its own checkpoint, even if the job first started from that of another run
            job.composed = job.composed.with_settings({"resume": "auto"})
        return mistakes

    def _submit(self, source: Source) -> int:
        """Submit all jobs and return; the same command later reports their states."""
        jobs = source.next_jobs()
        for job in jobs:
            job.save()
        for handle in self.launcher.start(jobs):
            LOGGER.info(f"job {handle.job.number} is {handle.job.cluster_job} in the queue")
        LOGGER.info(f"To follow them: {resume_command(self._typed, self.folder)} launcher.wait=true")
        return 0

    def _log_job(self, job: Job) -> None:
        self._report.log_job(job, self.launcher.log_path(job))


def _check_folder_name(name: str) -> None:
    """Reject a job's folder outside of its sweep's, or so deep in it that the ledger of a resumed sweep misses it."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or len(parts) > _MAX_DEPTH:
        raise ConfigError(
            f"hydra.sweep.subdir={name}",
            f"a job's folder is in that of its sweep, at most {_MAX_DEPTH} levels deep",
            "no hydra.sweep.subdir, or a relative one such as '${hydra.job.num}'",
        )


def _resume_override(job: Job) -> list[str]:
    """Return `resume=auto` for a training job; a typed `resume=` wins, as it selects a config too."""
    is_typed = any(override.startswith("resume=") for override in job.overrides)
    return ["resume=auto"] if _trains(job) and not is_typed else []


def _trains(job: Job) -> bool:
    return not any(override.startswith("mode=") and override != "mode=fit" for override in job.overrides)


class Ledger:
    """All jobs of a sweep's folder, including those of earlier commands.

    Args:
        folder: The sweep's folder.
    """

    def __init__(self, folder: Path) -> None:
        # a folder name with a `/` in it (hydra.sweep.subdir) is one level deeper
        files = [*folder.glob(f"*/{JOB_FILE}"), *folder.glob(f"*/*/{JOB_FILE}")]
        jobs = [read_job(file) for file in sorted(files)]
        self.jobs = sorted(jobs, key=lambda job: job.number)
        self._unclaimed = list(self.jobs)

    def claim(self, overrides: list[str]) -> Job | None:
        """Return the earlier job with the same overrides in any order, each job once; None if there is none."""
        wanted = sorted(overrides)
        for job in self._unclaimed:
            if sorted(job.overrides) == wanted:
                self._unclaimed.remove(job)
                return job
        return None

    def free_number(self, wanted: int) -> int:
        """Return the wanted number if no job has it, else the next one after all jobs."""
        used = {job.number for job in self.jobs}
        return wanted if wanted not in used else max(used) + 1

    def add(self, job: Job) -> None:
        """Add a new job."""
        self.jobs.append(job)
