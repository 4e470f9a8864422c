"""One sweep: its folder, and its jobs, composed and checked before the first one starts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from recipes.checkpoint.resume import newest_checkpoint
from recipes.config import compose_and_check
from recipes.errors import ConfigError
from recipes.launcher import Launcher
from recipes.launcher.job import JOB_FILE, Job, State, read_job
from recipes.runtime.console import LOGGER
from recipes.sweep.command_line import job_overrides, resume_command
from recipes.sweep.leaderboard import check_objective
from recipes.sweep.live_table import LiveTable
from recipes.sweep.pool import Pool, Source, worst_exit_code
from recipes.sweep.report import Records
from recipes.sweep.settings import Settings


class Sweep:
    """The jobs of one folder.

    Args:
        folder: Of the sweep.
        place: Where its jobs run.
        settings: What is made of them.
        config_folder: Where they are composed from.
        config_name: The file that composition begins with.
        keys: What is swept over.
        typed: The words of the command, to say how it goes on.
    """

    def __init__(
        self,
        *,
        folder: Path,
        place: Launcher,
        settings: Settings,
        config_folder: Path,
        config_name: str,
        keys: Sequence[str],
        typed: Sequence[str],
    ) -> None:
        check_objective(settings.objective)
        self.folder = folder
        self.settings = settings
        self.launcher = place
        self._where: dict[str, Any] = {"config_folder": config_folder, "config_name": config_name}
        self._typed = typed
        self._ledger = Ledger(folder)
        self._asked_for: list[Job] = []  # by this command
        self._records = Records(
            folder, self._ledger.jobs, settings=settings, keys=keys, typed=typed
        )
        self._table = LiveTable(Console(), self._ledger.jobs, self._records.swept)

    @property
    def jobs(self) -> list[Job]:
        """All there are, those of earlier starts included."""
        return self._ledger.jobs

    def prepare(
        self, overrides: Sequence[str], number: int, name_of: Callable[[int], str]
    ) -> tuple[Job, list[ConfigError]]:
        """The job that words ask for; one of an earlier start where the words are the same.

        It is composed and checked where it is to start: one that is over may have lost its data since.

        Args:
            overrides: As Hydra's sweeper makes them.
            number: Its place in the sweep, where it is new and nothing else has it.
            name_of: The name of a job's folder.
        """
        words = job_overrides(overrides)
        job = self._ledger.claim(words)
        if job is None:
            number = self._ledger.free_number(number)
            job = Job(number=number, folder=self.folder / name_of(number), overrides=words)
            if same := [other for other in self.jobs if other.folder == job.folder]:
                refused = ConfigError(
                    f"hydra.sweep.subdir={job.folder.name}",
                    f"jobs {same[0].number} and {number} would share it",
                    "no hydra.sweep.subdir, or one with ${hydra.job.num} in it",
                )
                return job, [refused]
            self._ledger.add(job)
        self._asked_for.append(job)
        return job, self._compose(job) if self.is_to_start(job) else []

    def claim(self, overrides: Sequence[str]) -> None:
        """Take an earlier start's job out of those that may be asked for again."""
        self._ledger.claim(job_overrides(overrides))

    def is_to_start(self, job: Job) -> bool:
        """Whether it has not the result that was asked for, and may have it."""
        if job.state.has_failed and not self.settings.retry_failed:
            return False
        return not job.state.is_over

    def carry_out(self, source: Source) -> int:
        """Run what the source asks for; the exit code of the sweep.

        Raises:
            KeyboardInterrupt: Ctrl-C; all jobs have ended.
        """
        self._records.write(with_page=False)
        if not self.launcher.waits:
            return self._submit(source)
        pool = Pool(self.launcher, source, tell=self._tell, show=self._table.show)
        asked = None
        try:
            with self._table:
                asked = pool.run()
        finally:
            self._records.say_end()
        if asked is not None:
            return worst_exit_code(self._asked_for)
        codes = [job.exit_code for job in self._asked_for if not job.state.is_over]
        return max((1 if code is None or code < 0 else code for code in codes), default=0)

    def refuse(self, job: Job, mistakes: Sequence[ConfigError]) -> None:
        """Record that a job's config is wrong."""
        job.state, job.exit_code = State.REFUSED, 2
        job.save()
        LOGGER.error(f"job {job.number} is refused: {mistakes[0]}")
        self._records.write(with_page=False)

    def _compose(self, job: Job) -> list[ConfigError]:
        where = str(job.folder).replace("'", "\\'")
        words = [*job.overrides, *_goes_on(job), f"hydra.run.dir='{where}'"]
        job.composed, mistakes = compose_and_check(words, **self._where)
        if mistakes or job.composed is None:
            return mistakes
        try:
            if more := self.launcher.extra_overrides(job):
                job.composed, mistakes = compose_and_check([*words, *more], **self._where)
            if not mistakes:
                self.launcher.num_devices(job)
        except ConfigError as mistake:
            return [mistake]
        if job.composed is not None and newest_checkpoint(job.folder) is not None and _trains(job):
            job.composed.config["resume"] = "auto"  # also one that began with another run's
        return mistakes

    def _submit(self, source: Source) -> int:
        """Hand all jobs over and leave them: the same command tells later how they are."""
        jobs = source.more()
        for job in jobs:
            job.save()
        for handle in self.launcher.start(jobs):
            LOGGER.info(f"job {handle.job.number} is {handle.job.cluster_job} in the queue")
        LOGGER.info(
            f"To follow them: {resume_command(self._typed, self.folder)} launcher.wait=true"
        )
        return 0

    def _tell(self, job: Job) -> None:
        self._records.tell(job, self.launcher.log_path(job))


def _goes_on(job: Job) -> list[str]:
    """The word by which a run that was cut goes on; one that is typed stays, as it brings a config of its own."""
    typed = any(word.startswith("resume=") for word in job.overrides)
    return ["resume=auto"] if _trains(job) and not typed else []


def _trains(job: Job) -> bool:
    return not any(word.startswith("mode=") and word != "mode=fit" for word in job.overrides)


class Ledger:
    """All jobs of a sweep's folder, those of earlier starts included.

    Args:
        folder: Of the sweep.
    """

    def __init__(self, folder: Path) -> None:
        files = [*folder.glob(f"*/{JOB_FILE}"), *folder.glob(f"*/*/{JOB_FILE}")]
        found = [read_job(file) for file in sorted(files)]
        self.jobs = sorted(found, key=lambda job: job.number)
        self._unclaimed = list(self.jobs)

    def claim(self, overrides: list[str]) -> Job | None:
        """The job of an earlier start that was asked for in the same words, each once; None: there is none."""
        words = sorted(overrides)
        for job in self._unclaimed:
            if sorted(job.overrides) == words:
                self._unclaimed.remove(job)
                return job
        return None

    def free_number(self, wanted: int) -> int:
        """A number that no job has: the one wanted, else the next after all."""
        taken = {job.number for job in self.jobs}
        return wanted if wanted not in taken else max(taken) + 1

    def add(self, job: Job) -> None:
        """Take in a new job."""
        self.jobs.append(job)
