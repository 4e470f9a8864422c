"""Hydra's sweeper over an Optuna study: asks for the next trial when there is room, stops what is not worth it."""

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from recipes.config.overrides import make_override, to_overrides
from recipes.errors import ConfigError, ConfigErrors
from recipes.runtime.console import LOGGER
from recipes.runtime.lock import lock_run_folder
from recipes.sweep.hydra_launcher import SubprocessLauncher
from recipes.sweep.leaderboard import Direction
from recipes.sweep.optuna_study import StudySource
from recipes.sweep.search_space import Choice, SearchSpace, read_space
from recipes.sweep.session import MULTIRUN

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

STUDY_FILE = "study.db"
_NAME = "sweep"


class OptunaSweeper(Sweeper):
    """A study of `n_trials` runs, kept in the sweep's folder, so that one that was killed goes on.

    Args:
        params: What to search, as one types it: `optimizer.lr: tag(log,interval(1e-4,1e-2))`.
        n_trials: Runs in all, those of earlier starts included.
        sampler: Makes what proposes them; takes `seed`.
        pruner: Says which are not worth going on with; None: none.
        prune_on: The metric it looks at, whenever it is logged.
        prune_direction: Whether less of that is better.
        seed: The same seed and results propose the same trials, also after a kill; None: other ones each time.
        storage: Another place than `study.db` in the sweep's folder, as Optuna's URL.
    """

    def __init__(
        self,
        *,
        params: Mapping[str, str] | None,
        n_trials: int,
        sampler: Callable[..., Any],
        pruner: Any,
        prune_on: str,
        prune_direction: Direction,
        seed: int | None,
        storage: str | None,
    ) -> None:
        self._params = params
        self._num_trials = n_trials
        self._make_sampler = sampler
        self._pruner = pruner
        self._prune_on = prune_on
        self._prune_direction = prune_direction
        self._seed = seed
        self._storage = storage
        self._launcher: SubprocessLauncher | None = None
        self._context: HydraContext | None = None
        self._config = DictConfig({})

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._context, self._config = hydra_context, config
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        if not isinstance(launcher, SubprocessLauncher):
            raise ConfigError(
                "hydra/launcher=…",
                "a study watches its runs, which another launcher does not let it",
                "no hydra/launcher=",
            )
        self._launcher = launcher

    def sweep(self, arguments: list[str]) -> None:
        """Carry out the study.

        Raises:
            ConfigErrors: The search space cannot be.
            KeyboardInterrupt: Ctrl-C; all runs have ended.
        """
        assert self._launcher is not None, "setup comes first"
        assert self._context is not None, "setup comes first"
        words = [*to_overrides(self._params), *arguments]
        space, mistakes = read_space(words, config_loader=self._context.config_loader)
        if not mistakes and not space.parameters:
            mistakes = [
                ConfigError(
                    "hydra/sweeper=optuna",
                    "there is nothing to search",
                    "'optimizer.lr=tag(log,interval(1e-4,1e-2))'",
                )
            ]
        if mistakes:
            raise ConfigErrors(mistakes, "The search space is wrong; nothing was started.")
        folder = self._launcher.folder(made=True)
        with lock_run_folder(folder, setting="hydra.sweep.dir"):
            OmegaConf.save(self._config, folder / "multirun.yaml")
            sweep = self._launcher.open()
            if not sweep.launcher.is_bounded:
                raise ConfigError(
                    "hydra/sweeper=optuna on a cluster without launcher.max_jobs, or launcher.wait=false",
                    "all trials would be submitted at once, before there is a result to learn from",
                    "launcher.max_jobs=4 launcher.wait=true",
                )
            source = StudySource(
                study=self._study(folder, sweep.settings.direction),
                sweep=sweep,
                distributions=make_distributions(space),
                words_of=lambda params: trial_overrides(space, params),
                name_of=self._launcher.name_of,
                num_trials=self._num_trials,
                seed_sampler=self._sampler_of,
                prune_on=self._prune_on if self._pruner is not None else None,
                # what a pruner compares is better in the direction of the study
                prune_sign=1 if self._prune_direction == sweep.settings.direction else -1,
            )
            LOGGER.info(
                f"Sweep: a study of {self._num_trials} trials over {', '.join(space.parameters)}"
                f" {sweep.launcher.describe()}, in {folder}"
            )
            source.log_start()
            MULTIRUN.exit_code = sweep.carry_out(source)

    def _study(self, folder: Path, direction: Direction) -> Any:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            storage=self._storage or f"sqlite:///{folder.resolve() / STUDY_FILE}",
            study_name=_NAME if self._storage is None else f"{self._config.name}_{folder.name}",
            direction=direction,
            sampler=self._sampler_of(0),
            pruner=self._pruner or optuna.pruners.NopPruner(),
            load_if_exists=True,
        )

    def _sampler_of(self, trial: int) -> Any:
        """A sampler that knows no more than the study does: what a restart would make of it as well."""
        import numpy

        words: dict[str, Any] = {}
        if self._seed is not None and "seed" in inspect.signature(self._make_sampler).parameters:
            own = numpy.random.SeedSequence([self._seed, trial]).generate_state(1)[0]
            words["seed"] = int(own)
        try:
            return self._make_sampler(**words)
        except TypeError as error:  # an argument of another sampler
            raise ConfigError(
                "hydra.sweeper.sampler=…", str(error), "'~hydra.sweeper.sampler.<that argument>'"
            ) from error


def make_distributions(space: SearchSpace) -> dict[str, "BaseDistribution"]:
    """A search space in Optuna's words; a choice is one of words to type."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    found: dict[str, BaseDistribution] = {}
    for key, one in space.parameters.items():
        if isinstance(one, Choice):
            found[key] = CategoricalDistribution(one.options)
        elif one.is_integer:
            step = 1 if one.step is None else int(one.step)
            found[key] = IntDistribution(int(one.low), int(one.high), log=one.log, step=step)
        else:
            found[key] = FloatDistribution(one.low, one.high, log=one.log, step=one.step)
    return found


def trial_overrides(space: SearchSpace, params: Mapping[str, Any]) -> list[str]:
    """What to type to have a trial."""
    sampled = [
        f"{key}={params[key]}"
        if isinstance(one, Choice)
        else make_override(key, _rounded(params[key]))
        for key, one in space.parameters.items()
    ]
    return [*space.fixed, *sampled]


def _rounded(value: float) -> float:
    """Six digits: more say nothing, and nobody can type them. Whole numbers as they are."""
    if isinstance(value, int) or value == 0:
        return value
    return round(value, 5 - math.floor(math.log10(abs(value))))
