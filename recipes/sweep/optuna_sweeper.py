"""Hydra's sweeper over an Optuna study: starts the next trial when there is room and prunes bad ones."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from recipes.config.check.metrics import find_wrong_direction
from recipes.config.overrides import make_override, to_overrides
from recipes.errors import ConfigError, ConfigErrors
from recipes.files import write_atomically
from recipes.runtime.console import LOGGER
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.lock import lock_run_folder
from recipes.sweep.hydra_launcher import SubprocessLauncher
from recipes.sweep.leaderboard import Direction
from recipes.sweep.optuna_study import RESULTS, StudySource
from recipes.sweep.search_space import Choice, SearchSpace, read_space
from recipes.sweep.session import MULTIRUN

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner

STUDY_FILE = "study.db"
_STUDY_NAME = "sweep"


class OptunaSweeper(Sweeper):
    """A study of `n_trials` runs, stored in the sweep's folder, so that the same command resumes it.

    Args:
        params: The search space in override syntax: `optimizer.lr: tag(log,interval(1e-4,1e-2))`.
        n_trials: Runs of the study, including those of earlier commands.
        sampler: Creates the Optuna sampler that proposes trials; called with `seed` if it accepts one.
        pruner: The Optuna pruner that stops bad trials early; None disables pruning.
        prune_on: The metric that the pruner compares whenever it is logged.
        prune_direction: Whether that metric is minimized or maximized.
        seed: Sampler seed: the same seed and earlier results give the same trials, even after a kill; None is random.
        storage: Optuna's storage URL; None is `study.db` in the sweep's folder.
    """

    def __init__(
        self,
        *,
        params: Mapping[str, Any] | None,
        n_trials: Annotated[int, ">= 1"],
        sampler: Callable[..., Any],
        pruner: "BasePruner | None",
        prune_on: str,
        prune_direction: Direction,
        seed: Annotated[int, ">= 0"] | None,
        storage: str | None,
    ) -> None:
        self._params = params
        self._num_trials = n_trials
        self._sampler_factory = sampler
        self._pruner = pruner
        self._prune_on = prune_on
        self._prune_direction = prune_direction
        self._seed = seed
        self._storage = storage
        self._hydra_launcher: SubprocessLauncher | None = None
        self._context: HydraContext | None = None
        self._config = DictConfig({})

    @override
    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._config = hydra_context, config
        if self._pruner is not None and (
            mistake := find_wrong_direction(
                "hydra.sweeper.prune_on", self._prune_on, "hydra.sweeper.prune_direction", self._prune_direction
            )
        ):
            LOGGER.warning(str(mistake))
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        if not isinstance(launcher, SubprocessLauncher):
            raise ConfigError(
                "hydra/launcher=…",
                "a study reads the metrics of its trials while they run, which only the default launcher supports",
                "the same command without hydra/launcher=…",
            )
        self._hydra_launcher = launcher

    @override
    def sweep(self, arguments: list[str]) -> None:
        """Run the study.

        Raises:
            ConfigErrors: The search space is invalid.
            ConfigError: The study cannot run with this launcher, sampler, storage or folder.
        """
        assert self._hydra_launcher is not None, "Hydra calls setup first"
        assert self._context is not None, "Hydra calls setup first"
        overrides = [*to_overrides(self._params), *arguments]
        space, mistakes = read_space(overrides, config_loader=self._context.config_loader)
        if not mistakes and not space.parameters:
            mistakes = [
                ConfigError(
                    "hydra/sweeper=optuna",
                    "there is nothing to search",
                    "'optimizer.lr=tag(log,interval(1e-4,1e-2))'",
                )
            ]
        if mistakes:
            raise ConfigErrors(mistakes, "The search space is invalid; nothing was started.")
        folder = self._hydra_launcher.create_folder()
        with self._hydra_launcher.discarding_if_rejected(), lock_run_folder(folder, setting="hydra.sweep.dir"):
            write_atomically(folder / "multirun.yaml", OmegaConf.to_yaml(self._config))
            sweep = self._hydra_launcher.open_sweep()
            if not sweep.launcher.limits_concurrency:
                raise ConfigError(
                    "hydra/sweeper=optuna on a cluster, with launcher.wait=false or no launcher.max_jobs",
                    "all trials would be submitted at once, before there is any result to learn from",
                    "launcher.max_jobs=4 launcher.wait=true",
                )
            source = StudySource(
                study=self._open_study(folder, sweep.settings.direction),
                sweep=sweep,
                distributions=make_distributions(space),
                make_overrides=lambda params: trial_overrides(space, params),
                get_folder_name=self._hydra_launcher.get_folder_name,
                num_trials=self._num_trials,
                make_sampler=self._make_sampler,
                prune_on=self._prune_on if self._pruner is not None else None,
                # Optuna's pruners assume that the metric has the direction of the study
                prune_sign=1 if self._prune_direction == sweep.settings.direction else -1,
            )
            LOGGER.info(
                f"Sweep: a study of {self._num_trials} trial{'s' if self._num_trials > 1 else ''}"
                f" over {', '.join(space.parameters)} {sweep.launcher.describe()}, in {folder}"
            )
            source.log_start()
            MULTIRUN.exit_code = sweep.run(source, results=RESULTS)
            if source.has_failed:
                MULTIRUN.exit_code = max(MULTIRUN.exit_code, ExitCode.UNSAVED)

    def _open_study(self, folder: Path, direction: Direction) -> Any:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        file = folder.resolve() / STUDY_FILE
        sampler, pruner = self._make_sampler(0), self._pruner or optuna.pruners.NopPruner()
        try:
            return optuna.create_study(
                storage=self._storage or f"sqlite:///{file}",
                study_name=_STUDY_NAME if self._storage is None else f"{self._config.name}_{folder.name}",
                direction=direction,
                sampler=sampler,
                pruner=pruner,
                load_if_exists=True,
            )
        except Exception as error:  # each storage backend raises its own: SQLAlchemy, Redis, gRPC, Optuna
            what = f"hydra.sweeper.storage={self._storage}" if self._storage else f"hydra.sweep.dir={folder}"
            fix = (
                f"hydra.sweeper.storage={'<another one>' if '://' in self._storage else f'sqlite:///{self._storage}'}"
                if self._storage
                else f"hydra.sweep.dir=<another folder>, or rm {file}"
            )
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(what, f"the study cannot be opened: {reason}", fix) from error

    def _make_sampler(self, trial: int) -> Any:
        """Return a sampler seeded by seed and trial number alone: a resumed study proposes the same trials."""
        import numpy

        options: dict[str, Any] = {}
        if self._seed is not None and "seed" in inspect.signature(self._sampler_factory).parameters:
            seeds = numpy.random.SeedSequence([self._seed, trial])
            options["seed"] = int(seeds.generate_state(1)[0])
        try:
            return self._sampler_factory(**options)
        except TypeError as error:  # an argument that this sampler does not have
            raise ConfigError(
                "hydra.sweeper.sampler=…", str(error), "'~hydra.sweeper.sampler.<that argument>'"
            ) from error


def make_distributions(space: SearchSpace) -> dict[str, "BaseDistribution"]:
    """Return the search space as Optuna's distributions; a choice becomes a categorical of strings."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    distributions: dict[str, BaseDistribution] = {}
    for key, parameter in space.parameters.items():
        if isinstance(parameter, Choice):
            distributions[key] = CategoricalDistribution(parameter.options)
            continue
        low, high, log, step = parameter.low, parameter.high, parameter.log, parameter.step
        if parameter.is_integer:
            distributions[key] = IntDistribution(int(low), int(high), log=log, step=int(step or 1))
        else:
            distributions[key] = FloatDistribution(low, high, log=log, step=step)
    return distributions


def trial_overrides(space: SearchSpace, params: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a trial with these parameters."""
    sampled = [
        f"{key}={params[key]}" if isinstance(parameter, Choice) else make_override(key, _round(params[key]))
        for key, parameter in space.parameters.items()
    ]
    return [*space.fixed, *sampled]


def _round(value: float) -> float:
    """Round to six significant digits, which are short to type and precise enough; integers are exact."""
    return value if isinstance(value, int) else float(f"{value:.6g}")
