"""One sweep: its folder, its jobs composed and checked before the first one starts, what is told of them."""

import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from recipes.checkpoint.resume import newest_checkpoint
from recipes.launch import compose_and_check
from recipes.launcher.place import Place
from recipes.mistake import Mistake
from recipes.sweep.leaderboard import (
    SWEEP_FILE,
    check_objective,
    objective_of,
    ranked,
    swept_words,
    write_leaderboard,
)
from recipes.sweep.ledger import Job, Ledger
from recipes.sweep.pool import Pool, Source, exit_code_of
from recipes.sweep.settings import Settings
from recipes.sweep.state import State
from recipes.sweep.table import LiveTable, time_text

LOGGER = logging.getLogger("lightning_recipes")
# words about how the jobs are carried out: the same job by others
_NOT_OF_A_JOB = ("launcher", "sweep", "hydra", "ignore_slurm")
_TAIL_LINES = 6
_OF_SRUN = ("srun: ", "slurmstepd: ")  # which only say that the ranks have ended


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
        place: Place,
        settings: Settings,
        config_folder: Path,
        config_name: str,
        keys: Sequence[str],
        typed: Sequence[str],
    ) -> None:
        check_objective(settings.objective)
        self.folder = folder
        self.settings = settings
        self.place = place
        self._where: dict[str, Any] = {"config_folder": config_folder, "config_name": config_name}
        self._typed = typed
        self._keys = [key.lstrip("+") for key in keys]
        self._ledger = Ledger(folder)
        self._table = LiveTable(Console(), self._ledger.jobs)

    @property
    def jobs(self) -> list[Job]:
        """All there are, those of earlier starts included."""
        return self._ledger.jobs

    def prepare(
        self, overrides: Sequence[str], number: int, name_of: Callable[[int], str]
    ) -> tuple[Job, list[Mistake]]:
        """The job that words ask for, composed and checked; one of an earlier start where the words are the same.

        Args:
            overrides: As Hydra's sweeper makes them.
            number: Its place in the sweep, where it is new and nothing else has it.
            name_of: The name of a job's folder.
        """
        words = words_of_job(overrides)
        job = self._ledger.claim(words)
        if job is None:
            number = self._ledger.free_number(number)
            job = Job(number=number, folder=self.folder / name_of(number), overrides=words)
            self._ledger.add(job)
        return job, self._compose(job)

    def claim(self, overrides: Sequence[str]) -> None:
        """Take an earlier start's job out of those that may be asked for again."""
        self._ledger.claim(words_of_job(overrides))

    def _compose(self, job: Job) -> list[Mistake]:
        where = str(job.folder).replace("'", "\\'")
        words = [*_resuming(job), f"hydra.run.dir='{where}'"]
        job.composed, mistakes = compose_and_check(words, **self._where)
        if mistakes or job.composed is None:
            return mistakes
        try:
            if more := self.place.words_of(job):
                job.composed, mistakes = compose_and_check([*words, *more], **self._where)
            if not mistakes:
                self.place.num_devices(job)
        except Mistake as mistake:
            return [mistake]
        return mistakes

    def is_to_start(self, job: Job) -> bool:
        """Whether it has not the result that was asked for, and may have it."""
        if job.state.has_failed and not self.settings.repeat_failed:
            return False
        return not job.state.is_over

    def carry_out(self, source: Source) -> int:
        """Run what the source asks for; the exit code of the sweep.

        Raises:
            KeyboardInterrupt: Ctrl-C; all jobs have ended.
        """
        self._write()
        if not self.place.waits:
            return self._submit(source)
        pool = Pool(self.place, source, tell=self._tell, show=self._table.show)
        asked = None
        try:
            with self._table:
                asked = pool.run()
        finally:
            self._say_end()
        if asked is not None:
            return exit_code_of(asked, self.jobs)
        codes = [job.exit_code for job in self.jobs if not job.state.is_over]
        return max((1 if code is None or code < 0 else code for code in codes), default=0)

    def _submit(self, source: Source) -> int:
        """Hand all jobs over and leave them: the same command tells later how they are."""
        jobs = source.more()
        for job in jobs:
            job.save()
        for handle in self.place.start(jobs):
            LOGGER.info(f"job {handle.job.number} is {handle.job.cluster_job} in the queue")
        LOGGER.info(f"To follow them: {again(self._typed, self.folder)} launcher.wait=true")
        return 0

    def refuse(self, job: Job, mistakes: Sequence[Mistake]) -> None:
        """Record that a job's config is wrong."""
        job.state, job.exit_code = State.REFUSED, 2
        job.save()
        LOGGER.error(f"job {job.number} is refused: {mistakes[0]}")
        self._write()

    def _tell(self, job: Job) -> None:
        words = self._swept()
        self._table.words = words
        said = " ".join(f"{key}={value}" for key, value in words[job.number].items())
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
                LOGGER.error(_tail(self.place.log_of(job)))
        self._write(compares=job.exit_code is not None)

    def _swept(self) -> dict[int, dict[str, str]]:
        return swept_words(self.jobs, self._keys)

    def _judged(self, job: Job) -> str:
        value = objective_of(job.folder, self.settings.objective)
        if value is not None and not job.state.has_failed:
            return f"{self.settings.objective} {value:.6g}"
        return f"exit code {job.exit_code}"

    def _write(self, *, compares: bool = True) -> None:
        """The leaderboard, and the page where there is something to compare."""
        settings = self.settings
        write_leaderboard(
            self.folder,
            self.jobs,
            keys=self._keys,
            objective=settings.objective,
            direction=settings.direction,
        )
        over = [job for job in self.jobs if job.exit_code is not None]
        folders = [job.folder for job in over if (job.folder / "config.yaml").is_file()]
        if compares and settings.compare is not None and folders:
            sort = settings.objective
            settings.compare(
                folders, self.folder / "report.html", sort=sort, dashboard=settings.dashboard
            )

    def _say_end(self) -> None:
        counts = {state: sum(job.state is state for job in self.jobs) for state in State}
        told = ", ".join(
            f"{count} {str(state).replace('_', ' ')}" for state, count in counts.items() if count
        )
        LOGGER.info(f"Sweep: {told}; {self.folder / SWEEP_FILE}")
        best = ranked(self.jobs, self.settings.objective, self.settings.direction)[:1]
        for job in best:
            if job.state is State.FINISHED:
                LOGGER.info(
                    f"Best: job {job.number}, {self._judged(job)}:"
                    f" python train.py {shlex.join(job.overrides)}"
                )
        if any(not job.state.is_over and not job.state.has_failed for job in self.jobs):
            LOGGER.info(f"To go on: {again(self._typed, self.folder)}")


def words_of_job(overrides: Sequence[str]) -> list[str]:
    """What makes a job what it is, whoever carries it out and wherever."""
    # Hydra's grid says what is to be deleted with a value
    plain = [word.removesuffix("=null") if word.startswith("~") else word for word in overrides]
    return [word for word in plain if _room(word) not in _NOT_OF_A_JOB]


def again(typed: Sequence[str], folder: Path) -> str:
    """The command that goes on with a sweep."""
    kept = [word for word in typed if not word.startswith("hydra.sweep.dir=")]
    return f"python train.py {shlex.join([*kept, f'hydra.sweep.dir={folder}'])}"


def _room(word: str) -> str:
    key = word.lstrip("+~").partition("=")[0]
    return key.partition("@")[0].partition(".")[0].partition("/")[0]


def _resuming(job: Job) -> list[str]:
    """The job's words; where it was cut it goes on, also if it began with the checkpoint of another run."""
    trains = not any(word.startswith("mode=") and word != "mode=fit" for word in job.overrides)
    typed = any(word.startswith("resume=") for word in job.overrides)
    if not trains or (typed and newest_checkpoint(job.folder) is None):
        return job.overrides
    return [*(word for word in job.overrides if not word.startswith("resume=")), "resume=auto"]


def _tail(log: Path) -> str:
    """The last that a job has said."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    lines = [line for line in lines if line and not line.startswith(_OF_SRUN)]
    return "\n".join(f"  {line}" for line in [*lines[-_TAIL_LINES:], f"all of it: {log}"])
