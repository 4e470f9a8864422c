"""Hydra's launcher of these recipes: every job of `-m` in processes of its own, several side by side."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from recipes.errors import ConfigError, ConfigErrors
from recipes.launcher.job import Job
from recipes.runtime.console import open_console
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.lock import lock_run_folder
from recipes.sweep.leaderboard import read_objective
from recipes.sweep.session import MULTIRUN
from recipes.sweep.settings import Settings
from recipes.sweep.sweep import Sweep

LOGGER = logging.getLogger("lightning_recipes")
LOG_FILE = "sweep.log"
_MANY = 50  # jobs that take some ten seconds to compose


class SubprocessLauncher(Launcher):
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
            ConfigErrors: Some of them cannot be; none has been started.
            KeyboardInterrupt: Ctrl-C; all have ended.
        """
        with lock_run_folder(self.folder(made=True), setting="hydra.sweep.dir"):
            sweep = self.open()
            jobs = self._prepare(sweep, job_overrides, initial_job_idx)
            source = _FixedJobs([job for job in jobs if sweep.is_to_start(job)])
            log_start(sweep, jobs)
            MULTIRUN.exit_code = max(MULTIRUN.exit_code, sweep.carry_out(source))
            if MULTIRUN.exit_code in (ExitCode.PREEMPTED, ExitCode.TERMINATED):
                raise SystemExit(MULTIRUN.exit_code)  # no further batch
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
            ConfigError: What it asks for cannot be.
        """
        folder = self.folder()
        open_console(folder / LOG_FILE)
        settings = instantiate(self._config.sweep, _convert_="all")
        assert isinstance(settings, Settings)
        return Sweep(
            folder=folder,
            place=instantiate(self._config.launcher, _convert_="all"),
            settings=settings,
            config_folder=MULTIRUN.config_folder,
            config_name=MULTIRUN.config_name,
            keys=[*(self._config.hydra.sweeper.params or {}), *MULTIRUN.keys],
            typed=MULTIRUN.command,
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
        wrong: list[tuple[Job, list[ConfigError]]] = []
        for number, overrides in enumerate(job_overrides, start=first):
            job, mistakes = sweep.prepare(overrides, number, partial(self.name_of, overrides))
            jobs.append(job)
            if mistakes:
                wrong.append((job, mistakes))
        if wrong and not sweep.settings.skip_invalid:
            told = {str(mistake): mistake for _, mistakes in wrong for mistake in mistakes}
            which = ", ".join(str(job.number) for job, _ in wrong)
            raise ConfigErrors(
                list(told.values()),
                f"The config of {len(wrong)} of {len(jobs)} jobs ({which}) is wrong; nothing was started."
                " sweep.skip_invalid=true carries out the others.",
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
            result.return_value = read_objective(job.folder, sweep.settings.objective)
        else:
            result.status = JobStatus.FAILED
            result.return_value = RuntimeError(f"job {job.number} {job.state}; see {job.folder}")
        return result


class _FixedJobs:
    """The jobs of a grid."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = list(jobs)

    def more(self) -> Sequence[Job]:
        jobs, self._jobs = self._jobs, []
        return jobs

    def ended(self, job: Job) -> None: ...

    def should_prune(self, job: Job, rows: object) -> bool:
        return False


def log_start(sweep: Sweep, jobs: Sequence[Job]) -> None:
    """How many jobs there are, and what a sweep that goes on makes of those that were."""
    many = "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"
    LOGGER.info(f"Sweep: {many} {sweep.launcher.describe()}, in {sweep.folder}")
    failed = sum(job.state.has_failed and not sweep.is_to_start(job) for job in jobs)
    counts = {
        "over from an earlier start": sum(job.state.is_over for job in jobs),
        "going on where cut": sum(job.state.is_cut for job in jobs),
        "failed and left alone; sweep.retry_failed=true repeats such": failed,
    }
    if told := ", ".join(f"{count} {what}" for what, count in counts.items() if count):
        LOGGER.info(told)
