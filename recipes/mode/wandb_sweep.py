"""The YAML of a W&B sweep, from the entry of conf/sweep/ that `-m` takes. Seconds; no run is built."""

import os
import shlex
from pathlib import Path
from typing import Any, Literal

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra

from recipes.config.check.command_line import compose_typed
from recipes.config.compose import CONF, Composed, parse_override
from recipes.config.overrides import make_override
from recipes.errors import ConfigError
from recipes.logger.wandb.init import DEFAULT_PROJECT
from recipes.runtime.console import LOGGER
from recipes.sweep.leaderboard import check_objective
from recipes.sweep.search_space import Choice, SearchSpace, read_space
from recipes.sweep.wandb_sweep import Search, command_of, described, fixed_words, name_of

PROGRAM = CONF.parent / "train.py"


def wandb_sweep(
    composed: Composed,
    *,
    objective: str,
    direction: Literal["minimize", "maximize"],
    method: Literal["grid", "random", "bayes"] | None,
    early_terminate: int | None,
    num_trials: int | None,
    path: str,
) -> int:
    """Write the YAML and say what to type next.

    Args:
        composed: The words of the sweep, and those that every trial is given.
        objective: What a trial is judged by: a number of `summary.json` or a column of `metrics.csv`.
        direction: Which way is better.
        method: How W&B searches; None: `grid` where all values can be listed, else `bayes`.
        early_terminate: Validations after which W&B's Hyperband first stops trials; None: it stops none.
        num_trials: Of all agents; None: a grid's, or without end.
        path: The file.

    Raises:
        ConfigError: W&B cannot search this space so.
    """
    from recipes.errors import format_report
    from recipes.runtime.exit_codes import ExitCode

    check_objective(objective)
    space, fixed, mistakes = _searched(composed)
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
    command = command_of(fixed, flags=_flags(composed))
    _write(_head(composed, fixed) | described(space, search, command), Path(path))
    return 0


def _searched(composed: Composed) -> tuple[SearchSpace, list[str], list[ConfigError]]:
    """What the trials differ in, what all of them are given, and what cannot be."""
    words = [*composed.sweep_overrides, *fixed_words(composed.overrides)]
    space, mistakes = read_space(words, config_loader=_loader(composed))
    if not mistakes and not space.parameters:
        raise ConfigError(
            "mode=wandb_sweep",
            "there is nothing to search",
            "mode=wandb_sweep sweep=<an entry of conf/sweep/>",
        )
    fixed = _of_every_trial(composed, space.fixed)
    return space, fixed, mistakes or _refused(composed, space, fixed)


def _loader(composed: Composed) -> ConfigLoader:
    """What knows the options of each group."""
    GlobalHydra.instance().clear()
    folder = str(Path(composed.config_folder).resolve())
    with initialize_config_dir(folder, version_base="1.3"):
        return GlobalHydra.instance().config_loader()


def _flags(composed: Composed) -> list[str]:
    """Hydra's own, where the config is not the one in conf/."""
    is_ours = Path(composed.config_folder).resolve() == CONF.resolve()
    folder = [] if is_ours else ["--config-path", composed.config_folder]
    name = composed.config_name
    return [*folder, *([] if name == "config" else ["--config-name", name])]


def _of_every_trial(composed: Composed, fixed: list[str]) -> list[str]:
    """What was typed, and what makes a trial of it: told to W&B, one run, which goes on when it is started again."""
    typed = {parse_override(word).key_or_group: word for word in fixed}
    words = ["resume=auto"]
    if "sweep" in typed:
        words.append("hydra.mode=RUN")  # whatever the entry says
    if "wandb" not in composed.config["logger"]:
        if "logger" in typed:
            raise ConfigError(typed["logger"], "W&B is not told of the trials", "logger=wandb")
        words.append("logger=wandb")
    return [*fixed, *words]


def _refused(composed: Composed, space: SearchSpace, fixed: list[str]) -> list[ConfigError]:
    """What cannot be composed of the options, one by one; of an interval one end stands for all."""
    mistakes: dict[str, ConfigError] = {}
    for key, parameter in space.parameters.items():
        name = name_of(key)
        values = parameter.values if isinstance(parameter, Choice) else (parameter.low,)
        for value in values:
            _, wrong = _composed(composed, [*fixed, make_override(name, value)])
            mistakes |= {str(mistake): mistake for mistake in wrong}
    return list(mistakes.values())


def _composed(composed: Composed, words: list[str]) -> tuple[Composed | None, list[ConfigError]]:
    return compose_typed(
        words, config_folder=Path(composed.config_folder), config_name=composed.config_name
    )


def _head(composed: Composed, fixed: list[str]) -> dict[str, Any]:
    """Whose sweep it is, as conf/logger/wandb.yaml says, what it is called, and what an agent starts."""
    trial, mistakes = _composed(composed, fixed)
    assert trial is not None, mistakes
    logger, option = trial.config["logger"]["wandb"], trial.choices["sweep"]
    name = composed.config["name"]
    head = {
        "program": os.path.relpath(PROGRAM),
        "name": name if option == "none" else f"{name}_{option}",
        "project": logger["project"] or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
    }
    return head if logger["entity"] is None else head | {"entity": logger["entity"]}


def _write(content: dict[str, Any], path: Path) -> None:
    header = "# A W&B sweep, made by train.py mode=wandb_sweep. Start its agents in the folder where it was made.\n"
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
    try:
        path.write_text(header + text)
    except OSError as error:
        raise ConfigError(
            f"mode.path={path}", f"it cannot be written: {error.strerror}", "mode.path=<a file>"
        ) from error
    shown = shlex.quote(str(path))
    LOGGER.info(
        f"A {content['method']} search over {', '.join(content['parameters'])} is in {path}"
    )
    LOGGER.info(f"To begin: wandb sweep {shown}")
    LOGGER.info("Then, as often as there are devices: wandb agent <the path that it prints>")
