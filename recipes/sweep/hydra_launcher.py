"""Hydra launcher that runs every job of `-m` in its own processes, several at a time."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from typing_extensions import override

from recipes.config.check.metrics import logs_anything
from recipes.config.instantiate import make
from recipes.errors import ConfigError, ConfigErrors
from recipes.launcher.job import JOB_FILE, Job
from recipes.runtime.console import LOGGER, open_console
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.lock import lock_run_folder
from recipes.sweep.command_line import job_overrides as identify_job
from recipes.sweep.leaderboard import check_objective, read_objective
from recipes.sweep.session import MULTIRUN
from recipes.sweep.settings import Settings
from recipes.sweep.sweep import Sweep

LOG_FILE = "sweep.log"
_MANY_JOBS = 50  # composing them takes about ten seconds


class SubprocessLauncher(Launcher):
    """Runs each job as a new process tree from one frozen config; several at a time if there is room."""

    def __init__(self) -> None:
        self._context: HydraContext | None = None
        self._config = DictConfig({})
        self._has_new_log = False

    @override
    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context = hydra_context
        self._config = config

    @override
    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run one batch of jobs.

        Raises:
            ConfigErrors: The config of some jobs is invalid; none was started.
            SystemExit: A signal, Ctrl-C included, has stopped the sweep, so Hydra must not launch another batch.
        """
        folder = self.create_folder()
        with self.discarding_if_rejected(), lock_run_folder(folder, setting="hydra.sweep.dir"):
            sweep = self.open_sweep()
            jobs = self._prepare(sweep, job_overrides, initial_job_idx)
            unique = list({job.number: job for job in jobs}.values())
            source = _FixedJobs([job for job in unique if sweep.should_start(job)])
            log_start(sweep, unique)
            MULTIRUN.exit_code = max(MULTIRUN.exit_code, sweep.run(source))
            if MULTIRUN.exit_code in (ExitCode.PREEMPTED, ExitCode.TERMINATED, ExitCode.INTERRUPTED):
                raise SystemExit(MULTIRUN.exit_code)
            is_grid = self._config.hydra.sweeper._target_.endswith("BasicSweeper")
            return [self._job_return(sweep, job, is_grid=is_grid) for job in jobs]

    def create_folder(self) -> Path:
        """Create the sweep's folder and return its path.

        Raises:
            ConfigError: It cannot be created or written to.
        """
        folder = self._folder
        self._has_new_log = not (folder / LOG_FILE).exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            open_console(folder / LOG_FILE)
        except OSError as error:
            raise ConfigError(
                f"hydra.sweep.dir={folder}",
                f"the folder cannot be written to: {error.strerror}",
                "hydra.sweep.dir=<a folder of yours>",
            ) from error
        return folder

    @contextlib.contextmanager
    def discarding_if_rejected(self) -> Iterator[None]:
        """Remove the log of a new sweep, and Hydra's record of it, if it is rejected before any job has a folder."""
        try:
            yield
        except (ConfigError, ConfigErrors):
            folder = self._folder
            if self._has_new_log and not any(any(folder.glob(f"{below}/{JOB_FILE}")) for below in ("*", "*/*")):
                for name in (LOG_FILE, "multirun.yaml"):
                    (folder / name).unlink(missing_ok=True)
            raise

    def open_sweep(self) -> Sweep:
        """Return the sweep of this config.

        Raises:
            ConfigError: A setting of the sweep or the launcher is invalid, or no run has the objective.
        """
        settings = make(self._get_section("sweep"))
        assert isinstance(settings, Settings), type(settings)
        logging: Any = OmegaConf.to_container(OmegaConf.masked_copy(self._config, ["task", "callbacks"]))
        check_objective(settings.objective, settings.direction, logs_anything=logs_anything(logging))
        if MULTIRUN.ranking:
            LOGGER.info(f"Runs are ranked as checkpoints are: {' '.join(MULTIRUN.ranking)}")
        return Sweep(
            folder=self._folder,
            launcher=make(self._get_section("launcher")),
            settings=settings,
            config_folder=MULTIRUN.config_folder,
            config_name=MULTIRUN.config_name,
            keys=[*(self._config.hydra.sweeper.params or {}), *MULTIRUN.keys],
            typed=MULTIRUN.command,
        )

    def get_folder_name(self, overrides: Sequence[str], number: int) -> str:
        """Return the name of a job's folder, as `hydra.sweep.subdir` defines it."""
        sweep: Any = OmegaConf.to_container(self._config.hydra.sweep)
        if sweep["subdir"] == "${hydra.job.num}":
            return str(number)  # the default, without composing the job's config
        assert self._context is not None, "Hydra calls setup first"
        config: Any = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.num = number
            config.hydra.job.id = str(number)
        return str(config.hydra.sweep.subdir)

    def _get_section(self, name: str) -> dict[str, Any]:
        """Return a section of the config as plain, resolved values."""
        section: Any = OmegaConf.to_container(self._config[name], resolve=True)
        return dict(section)

    @property
    def _folder(self) -> Path:
        return Path(os.path.expanduser(self._config.hydra.sweep.dir))

    def _prepare(self, sweep: Sweep, job_overrides: Sequence[Sequence[str]], first_number: int) -> list[Job]:
        """Compose and check all jobs; reject invalid ones, or stop before the first job starts.

        Overrides that repeat those of another job stand for that job, which runs once: `-m optimizer.lr=1e-3,0.001`.
        """
        if len(job_overrides) >= _MANY_JOBS:
            LOGGER.info(f"Composing and checking {len(job_overrides)} jobs")
        jobs: list[Job] = []
        invalid: list[tuple[Job, list[ConfigError]]] = []
        known: dict[tuple[str, ...], Job] = {}
        for number, overrides in enumerate(job_overrides, start=first_number):
            identity = tuple(sorted(identify_job(overrides)))
            if identity in known:
                LOGGER.info(f"job {number} would repeat job {known[identity].number} and is not run")
                jobs.append(known[identity])
                continue
            job, mistakes = sweep.prepare(overrides, number, partial(self.get_folder_name, overrides))
            jobs.append(job)
            known[identity] = job
            if mistakes:
                invalid.append((job, mistakes))
        if invalid and not sweep.settings.skip_invalid:
            unique = {str(mistake): mistake for _, mistakes in invalid for mistake in mistakes}
            numbers = ", ".join(str(job.number) for job, _ in invalid)
            raise ConfigErrors(
                list(unique.values()),
                f"The config of {len(invalid)} of {len(jobs)} jobs ({numbers}) is invalid; nothing was started."
                " sweep.skip_invalid=true runs the others.",
            )
        for job, mistakes in invalid:
            sweep.reject(job, mistakes)
        return jobs

    def _job_return(self, sweep: Sweep, job: Job, *, is_grid: bool) -> JobReturn:
        """Return the result of a job for Hydra's sweeper.

        The grid ignores return values and would stop at the first failed job, so for it every job counts as completed.
        """
        result = JobReturn()
        result.overrides = job.overrides
        result.working_dir = str(job.folder)
        if job.state.is_over or is_grid:
            result.status = JobStatus.COMPLETED
            result.return_value = read_objective(job.folder, sweep.settings.objective)
        else:
            result.status = JobStatus.FAILED
            result.return_value = RuntimeError(f"job {job.number} {job.state}; see {job.folder}")
        return result


class _FixedJobs:
    """The jobs of one batch, as a source without pruning."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = list(jobs)

    def next_jobs(self) -> Sequence[Job]:
        jobs, self._jobs = self._jobs, []
        return jobs

    def job_ended(self, job: Job) -> None: ...

    def should_prune(self, job: Job, rows: object) -> bool:
        return False


def log_start(sweep: Sweep, jobs: Sequence[Job]) -> None:
    """Log the number of jobs, and how a resumed sweep treats those of earlier commands."""
    num_jobs = "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"
    LOGGER.info(f"Sweep: {num_jobs} {sweep.launcher.describe()}, in {sweep.folder}")
    counts = {
        "already finished": sum(job.state.is_over for job in jobs),
        "resumed": sum(job.state.is_cut for job in jobs),
        "failed and skipped; sweep.retry_failed=true retries them": sum(
            job.state.has_failed and not sweep.should_start(job) for job in jobs if job.number not in sweep.rejected
        ),
    }
    if line := ", ".join(f"{count} {what}" for what, count in counts.items() if count):
        LOGGER.info(line)
