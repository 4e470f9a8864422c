"""Hydra's launcher of these recipes: every job of `-m` in processes of its own, several side by side."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from recipes.entry.spawn import EXIT_TERMINATED
from recipes.errors import Mistake, MistakesError
from recipes.launcher.job import Job
from recipes.runtime.console import open_console
from recipes.runtime.lock import alone_in
from recipes.runtime.signals import EXIT_PREEMPTED
from recipes.sweep.leaderboard import objective_of
from recipes.sweep.plugins import enter
from recipes.sweep.settings import Settings
from recipes.sweep.sweep import Sweep

LOGGER = logging.getLogger("lightning_recipes")
NAME = "recipes"
LOG_FILE = "sweep.log"
_MANY = 50  # jobs that take some ten seconds to compose


@dataclass(kw_only=True)
class Typed:
    """What Hydra does not hand to a launcher, and takes back from none.

    Attributes:
        config_folder: Where the jobs are composed from.
        config_name: The file that composition begins with.
        keys: What is swept over in the words that were typed.
        command: All words of the command.
        exit_code: Of the sweep.
    """

    config_folder: Path = Path()
    config_name: str = "config"
    keys: Sequence[str] = ()
    command: Sequence[str] = ()
    exit_code: int = 0


TYPED = Typed()


class FreshProcesses(Launcher):
    """Each job a fresh tree of processes from one frozen config; several side by side where there is room."""

    def __init__(self) -> None:
        self._context: HydraContext | None = None
        self._config = DictConfig({})

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._context = hydra_context
        self._config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Carry out a batch of jobs.

        Raises:
            MistakesError: Some of them cannot be; none has been started.
            KeyboardInterrupt: Ctrl-C; all have ended.
        """
        with alone_in(self.folder(made=True), word="hydra.sweep.dir"):
            sweep = self.open()
            jobs = self._prepare(sweep, job_overrides, initial_job_idx)
            source = _Fixed([job for job in jobs if sweep.is_to_start(job)])
            say_beginning(sweep, jobs)
            TYPED.exit_code = max(TYPED.exit_code, sweep.carry_out(source))
            if TYPED.exit_code in (EXIT_PREEMPTED, EXIT_TERMINATED):
                raise SystemExit(TYPED.exit_code)  # no further batch
            goes_on = self._config.hydra.sweeper._target_.endswith("BasicSweeper")
            return [self._returned(sweep, job, goes_on=goes_on) for job in jobs]

    def folder(self, *, made: bool = False) -> Path:
        """The folder of the sweep."""
        folder = Path(str(self._config.hydra.sweep.dir))
        if made:
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def open(self) -> Sweep:
        """The sweep of this config.

        Raises:
            Mistake: What it asks for cannot be.
        """
        folder = self.folder()
        open_console(folder / LOG_FILE)
        settings = instantiate(self._config.sweep, _convert_="all")
        assert isinstance(settings, Settings)
        return Sweep(
            folder=folder,
            place=instantiate(self._config.launcher, _convert_="all"),
            settings=settings,
            config_folder=TYPED.config_folder,
            config_name=TYPED.config_name,
            keys=[*(self._config.hydra.sweeper.params or {}), *TYPED.keys],
            typed=TYPED.command,
        )

    def name_of(self, overrides: Sequence[str], number: int) -> str:
        """The name of a job's folder, as `hydra.sweep.subdir` says."""
        if OmegaConf.to_container(self._config.hydra.sweep)["subdir"] == "${hydra.job.num}":  # type: ignore[index,call-overload]
            return str(number)
        assert self._context is not None
        config: Any = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.num = number
            config.hydra.job.id = str(number)
        return str(config.hydra.sweep.subdir)

    def _prepare(
        self, sweep: Sweep, job_overrides: Sequence[Sequence[str]], first: int
    ) -> list[Job]:
        """All jobs, composed and checked; those that cannot be are refused, or end the sweep before it begins."""
        if len(job_overrides) >= _MANY:
            LOGGER.info(f"Composing and checking {len(job_overrides)} jobs")
        jobs: list[Job] = []
        wrong: list[tuple[Job, list[Mistake]]] = []
        for number, overrides in enumerate(job_overrides, start=first):
            job, mistakes = sweep.prepare(overrides, number, partial(self.name_of, overrides))
            jobs.append(job)
            if mistakes:
                wrong.append((job, mistakes))
        if wrong and not sweep.settings.skip_refused:
            told = {str(mistake): mistake for _, mistakes in wrong for mistake in mistakes}
            which = ", ".join(str(job.number) for job, _ in wrong)
            raise MistakesError(
                list(told.values()),
                f"The config of {len(wrong)} of {len(jobs)} jobs ({which}) is wrong; nothing was started."
                " sweep.skip_refused=true carries out the others.",
            )
        for job, mistakes in wrong:
            sweep.refuse(job, mistakes)
        return jobs

    def _returned(self, sweep: Sweep, job: Job, *, goes_on: bool) -> JobReturn:
        """What Hydra's sweeper gets; the grid asks for nothing, and would end at the first failure."""
        result = JobReturn()
        result.overrides = job.overrides
        result.working_dir = str(job.folder)
        if job.state.is_over or goes_on:
            result.status = JobStatus.COMPLETED
            result.return_value = objective_of(job.folder, sweep.settings.objective)
        else:
            result.status = JobStatus.FAILED
            result.return_value = RuntimeError(f"job {job.number} {job.state}; see {job.folder}")
        return result


class _Fixed:
    """The jobs of a grid."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = list(jobs)

    def more(self) -> Sequence[Job]:
        jobs, self._jobs = self._jobs, []
        return jobs

    def ended(self, job: Job) -> None: ...

    def is_hopeless(self, job: Job, rows: object) -> bool:
        return False


def say_beginning(sweep: Sweep, jobs: Sequence[Job]) -> None:
    """How many jobs there are, and what a sweep that goes on makes of those that were."""
    many = "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"
    LOGGER.info(f"Sweep: {many} {sweep.place.describe()}, in {sweep.folder}")
    failed = sum(job.state.has_failed and not sweep.is_to_start(job) for job in jobs)
    counts = {
        "over from an earlier start": sum(job.state.is_over for job in jobs),
        "going on where cut": sum(job.state.is_cut for job in jobs),
        "failed and left alone; sweep.repeat_failed=true repeats such": failed,
    }
    if told := ", ".join(f"{count} {what}" for what, count in counts.items() if count):
        LOGGER.info(told)


def register(
    config_folder: Path, config_name: str, *, keys: Sequence[str], command: Sequence[str]
) -> None:
    """Make the launcher and the sweeper known to Hydra, and what they need to know. Repeatable."""
    TYPED.config_folder, TYPED.config_name = config_folder, config_name
    TYPED.keys, TYPED.command = keys, command
    TYPED.exit_code = 0
    from recipes.sweep.optuna_sweeper import OptunaSweeper

    enter(FreshProcesses, group="hydra/launcher", name=NAME)
    enter(OptunaSweeper)
