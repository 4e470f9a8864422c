"""Convert a search space to the config of a W&B sweep, whose agent starts each trial as a plain command."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.errors import HydraException

from recipes.config.compose import MODE_OF_SWEEPS
from recipes.config.overrides import parse_override
from recipes.errors import ConfigError, type_command
from recipes.sweep.leaderboard import LOGGED_METRICS
from recipes.sweep.search_space import Choice, Interval, SearchSpace

# names of parameters, from W&B's schema of a sweep (pip install 'wandb[sweeps]': sweeps/config/schema.json)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_MAX_VALUES = 1000  # in an enumerated list
# overrides of this command or of `-m`, which the trials must not get
_COMMAND_KEYS = ("mode", "hydra/sweeper", "hydra/launcher")
_COMMAND_SECTIONS = ("mode.", "hydra.sweeper.", "hydra.sweep.", "hydra.launcher.")


@dataclass(frozen=True, kw_only=True)
class Search:
    """W&B's search settings.

    Attributes:
        objective: Value that ranks trials: a key of `summary.json` or a column of `metrics.csv`.
        direction: `minimize` or `maximize`.
        method: `grid`, `random` or `bayes`; None is `grid` if all values can be listed, else `bayes`.
        early_terminate: Validations before W&B's Hyperband may stop a trial; None disables early stopping.
        num_trials: Total trials of all agents; None is the whole grid, or no limit.
    """

    objective: str
    direction: str
    method: str | None = None
    early_terminate: int | None = None
    num_trials: int | None = None


def sweep_config(space: SearchSpace, search: Search, command: Sequence[str]) -> dict[str, Any]:
    """Return the config that `wandb sweep` reads.

    Args:
        space: The search space.
        search: How W&B searches it.
        command: The command of a trial, from `trial_command`.

    Raises:
        ConfigError: W&B cannot search this space with this method.
    """
    method = search.method or ("grid" if all(map(_is_listed, space.parameters.values())) else "bayes")
    content: dict[str, Any] = {
        "method": method,
        "metric": {"name": search.objective, "goal": search.direction},
        "parameters": {
            parameter_name(key): _parameter(key, parameter, method) for key, parameter in space.parameters.items()
        },
        "command": list(command),
    }
    if search.num_trials is not None:
        content["run_cap"] = search.num_trials
    if search.early_terminate is not None:
        content["metric"]["name"] = _running_metric(search.objective)
        content["early_terminate"] = {"type": "hyperband", "min_iter": search.early_terminate}
    return content


def trial_command(fixed: Sequence[str], *, flags: Sequence[str]) -> list[str]:
    """Return the command with which an agent starts a trial; W&B replaces each `${…}`.

    Args:
        fixed: The overrides of every trial.
        flags: Hydra's own command-line flags.
    """
    return ["${env}", "${interpreter}", "${program}", *flags, *fixed, "${args_no_hyphens}"]


def fixed_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that every trial gets, out of those typed for `mode=wandb_sweep`.

    Raises:
        ConfigError: An override would put all trials into one folder.
    """
    fixed = []
    for override in overrides:
        key = parse_override(override).key_or_group
        if key == "hydra.run.dir" or (key == "resume" and override not in ("resume=null", "resume=auto")):
            raise ConfigError(
                override,
                "all trials of the sweep would share that folder",
                f"{MODE_OF_SWEEPS} without it",
            )
        if key not in (*_COMMAND_KEYS, "resume") and not key.startswith(_COMMAND_SECTIONS):
            fixed.append(override)
    return fixed


def parameter_name(key: str) -> str:
    """Return a key as the name of a W&B parameter: without its `+`, which `train.py` adds where it is needed.

    Raises:
        ConfigError: W&B does not allow a character of the key.
    """
    name = key.lstrip("+")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{key}=<a sweep>",
            "the names of W&B's parameters have letters, digits and _ . - only",
            f"{key}=<one value>, or the same sweep with {type_command('-m')}",
        )
    return name


def _is_listed(parameter: Choice | Interval) -> bool:
    return isinstance(parameter, Choice) or parameter.step is not None


def _parameter(key: str, parameter: Choice | Interval, method: str) -> dict[str, Any]:
    if isinstance(parameter, Choice):
        pairs = zip(parameter.options, parameter.values, strict=True)
        return {"values": [_agent_value(key, option, value) for option, value in pairs]}
    low, high = parameter.low, parameter.high
    if low == high:
        return {"value": low}
    if parameter.step is not None and (method == "grid" or parameter.step != 1 or not parameter.is_integer):
        # W&B's own quantized distributions round to multiples of the step, not to low + n * step
        return {"values": _listed(key, parameter)}
    if method == "grid":
        raise ConfigError(
            f"mode.method=grid {key}=interval({low},{high})",
            "a grid needs single values",
            f"mode.method=bayes, or {key}=<value>,<value>",
        )
    kind = "q_log_uniform_values" if parameter.log else "int_uniform"
    if not parameter.is_integer:
        kind = "log_uniform_values" if parameter.log else "uniform"
    quantum = {"q": 1} if kind.startswith("q_") else {}
    return {"distribution": kind, "min": low, "max": high} | quantum


def _agent_value(key: str, option: str, value: Any) -> Any:
    """Return the value if Hydra reads the agent's `key=<str of it>` back as the same value, else its text."""
    expected = repr(parse_override(f"{key}={option}").value())
    try:
        is_equal = repr(parse_override(f"{key}={value}").value()) == expected
    except HydraException:
        is_equal = False
    return value if is_equal else option


def _listed(key: str, interval: Interval) -> list[int | float]:
    assert interval.step is not None, f"{interval} cannot be enumerated"
    num_values = (interval.high - interval.low) / interval.step
    if num_values > _MAX_VALUES:
        raise ConfigError(
            f"{key}=range({interval.low},{interval.high},{interval.step})",
            f"W&B would get a list of {num_values:.0f} values",
            f"{key}=interval({interval.low},{interval.high})",
        )
    return interval.values()


def _running_metric(objective: str) -> str:
    """Return the metric by which running trials are compared."""
    if objective in LOGGED_METRICS:
        return LOGGED_METRICS[objective]
    if "/" in objective:
        return objective
    raise ConfigError(
        f"mode.early_terminate=… sweep.objective={objective}",
        "it is known only at the end of a trial",
        f"sweep.objective={LOGGED_METRICS['val_loss']}",
    )
