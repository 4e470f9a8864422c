"""Write a W&B sweep YAML from the same overrides and conf/sweep/ options as `-m`. Seconds; builds no run."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra

from recipes.config import compose_and_check
from recipes.config.check.command_line import compose_typed
from recipes.config.check.metrics import is_loss_validated, logs_anything
from recipes.config.compose import CONF, Composed
from recipes.config.overrides import make_override, parse_override
from recipes.config.resolved import ResolvedRun, resolve
from recipes.config.search_path import listing_own_options
from recipes.config.traits import declare_mode
from recipes.errors import ConfigError, format_report
from recipes.files import write_atomically
from recipes.logger.wandb.session import DEFAULT_PROJECT
from recipes.run_folder import claim_output
from recipes.runtime.console import LOGGER
from recipes.runtime.exit_codes import ExitCode
from recipes.sweep.leaderboard import check_objective
from recipes.sweep.search_space import Choice, SearchSpace, read_space
from recipes.sweep.wandb_sweep import (
    Search,
    fixed_overrides,
    parameter_name,
    sweep_config,
    trial_command,
)

PROGRAM = CONF.parent / "train.py"
_HEADER = (
    "# A W&B sweep, written by train.py mode=wandb_sweep. Start its agents in the folder where that command ran.\n"
)


@declare_mode(reads_data=True)
def wandb_sweep(
    resolved: ResolvedRun,
    *,
    objective: str,
    direction: Literal["minimize", "maximize"],
    method: Literal["grid", "random", "bayes"] | None,
    early_terminate: Annotated[int, ">= 1"] | None,
    num_trials: Annotated[int, ">= 1"] | None,
    path: str,
) -> int:
    """Write the YAML and log the next commands; return the exit code.

    Args:
        resolved: Composed command with the swept overrides and those of every trial.
        objective: Value that ranks trials: a key of `summary.json` or a column of `metrics.csv`.
        direction: Whether the objective is minimized or maximized.
        method: W&B search method; None is `grid` if all values can be listed, else `bayes`.
        early_terminate: Validations before W&B's Hyperband may stop a trial; None disables early stopping.
        num_trials: Total trials of all agents; None is the whole grid, or no limit.
        path: File to write.

    Raises:
        ConfigError: W&B cannot search this space with this method, or the file cannot be written.
    """
    config = resolved.config
    check_objective(objective, direction, logs_anything=logs_anything(config), has_val_loss=is_loss_validated(config))
    space, fixed, mistakes = _parse(resolved)
    if mistakes:
        LOGGER.error(format_report(mistakes))
        return ExitCode.INVALID_CONFIG
    search = Search(
        objective=objective,
        direction=direction,
        method=method,
        early_terminate=early_terminate,
        num_trials=num_trials,
    )
    file = claim_output(path, "mode.path", is_file=True, replaces=lambda text: text.startswith(_HEADER))
    command = trial_command(fixed, flags=_flags(resolved))
    content = _head(resolved, fixed) | sweep_config(space, search, command)
    _write(content, file)
    return 0


def _parse(resolved: ResolvedRun) -> tuple[SearchSpace, list[str], list[ConfigError]]:
    """Return the search space, the overrides of every trial, and all errors."""
    overrides = [*resolved.sweep_overrides, *fixed_overrides(resolved.overrides)]
    space, mistakes = read_space(overrides, config_loader=_config_loader(resolved))
    if not mistakes and not space.parameters:
        raise ConfigError(
            "mode=wandb_sweep",
            "there is nothing to search",
            "mode=wandb_sweep sweep=<an option of conf/sweep/>",
        )
    fixed = _trial_overrides(resolved, space.fixed)
    return space, fixed, mistakes or _check_values(resolved, space, fixed)


def _config_loader(resolved: ResolvedRun) -> ConfigLoader:
    """Return Hydra's loader, which lists the options of each config group."""
    GlobalHydra.instance().clear()
    folder = str(Path(resolved.config_folder).resolve())
    with listing_own_options(resolved.overrides), initialize_config_dir(folder, version_base="1.3"):
        return GlobalHydra.instance().config_loader()


def _flags(resolved: ResolvedRun) -> list[str]:
    """Return Hydra's flags for a config other than the default one in conf/."""
    is_default = Path(resolved.config_folder).resolve() == CONF.resolve()
    folder = [] if is_default else ["--config-path", resolved.config_folder]
    name = resolved.config_name
    return [*folder, *([] if name == "config" else ["--config-name", name])]


def _trial_overrides(resolved: ResolvedRun, fixed: list[str]) -> list[str]:
    """Return the fixed overrides plus those that make each trial a single, resumable run that logs to W&B."""
    typed = {parse_override(override).key_or_group: override for override in fixed}
    added = ["resume=auto"]
    if "sweep" in typed:
        added.append("hydra.mode=RUN")  # sweep= alone would start a sweep
    if "wandb" not in resolved.loggers:
        if "logger" in typed:
            raise ConfigError(typed["logger"], "the trials would not log to W&B", "logger=wandb")
        added.append("logger=wandb")
    return [*fixed, *added]


def _check_values(resolved: ResolvedRun, space: SearchSpace, fixed: list[str]) -> list[ConfigError]:
    """Compose a trial with each option alone, and with the lower end of each interval; return the errors."""
    mistakes: dict[str, ConfigError] = {}
    for key, parameter in space.parameters.items():
        name = parameter_name(key)
        values = parameter.values if isinstance(parameter, Choice) else (parameter.low,)
        for value in values:
            # of one start here: a trial of an agent has a folder of its own, which it resumes
            typed = [text for text in fixed if text != "resume=auto"]
            # no trial has exactly the end of an interval: it only has to compose
            check = _check_trial if isinstance(parameter, Choice) else _compose_trial
            _, found = check(resolved, [*typed, make_override(name, value)])
            # what does not fit the other values may fit those of another trial
            own = [mistake for mistake in found if mistake.setting.lstrip("+").startswith(f"{name}=")]
            mistakes |= {str(mistake): mistake for mistake in own}
    return list(mistakes.values())


def _check_trial(resolved: ResolvedRun, overrides: list[str]) -> tuple[Composed | None, list[ConfigError]]:
    return compose_and_check(overrides, config_folder=Path(resolved.config_folder), config_name=resolved.config_name)


def _compose_trial(resolved: ResolvedRun, overrides: list[str]) -> tuple[Composed | None, list[ConfigError]]:
    return compose_typed(overrides, config_folder=Path(resolved.config_folder), config_name=resolved.config_name)


def _head(resolved: ResolvedRun, fixed: list[str]) -> dict[str, Any]:
    """Return the program, name, project and entity of the sweep, the latter two from conf/logger/wandb.yaml."""
    trial, mistakes = _compose_trial(resolved, fixed)
    assert trial is not None, mistakes
    logger, option = resolve(trial).loggers["wandb"], trial.choices["sweep"]
    name = resolved.name
    head = {
        "program": os.path.relpath(PROGRAM),
        "name": name if option == "none" else f"{name}_{option}",
        "project": logger["project"] or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
    }
    return head if logger["entity"] is None else head | {"entity": logger["entity"]}


def _write(content: dict[str, Any], path: Path) -> None:
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
    write_atomically(path, _HEADER + text)
    shown = shlex.quote(str(path))
    LOGGER.info(f"A {content['method']} search over {', '.join(content['parameters'])} is in {path}")
    LOGGER.info(f"Create the sweep: wandb sweep {shown}")
    LOGGER.info("Then, once per device: wandb agent <the path that it prints>")
