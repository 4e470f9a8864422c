"""A search space as the description of a W&B sweep, whose agent starts each trial as one plain command. No cost."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.errors import HydraException

from recipes.config.compose import MODE_OF_SWEEPS, parse_override
from recipes.errors import ConfigError
from recipes.sweep.search_space import Choice, Interval, SearchSpace

# of the parameters' names, from W&B's schema of a sweep (pip install 'wandb[sweeps]': sweeps/config/schema.json)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_MAX_VALUES = 1000  # that are listed
# what is logged on the way to a number of summary.json
_SERIES = {"best_val_loss": "val/loss", "val_loss": "val/loss", "train_loss": "train/loss"}
# words about this start or about `-m`, which no trial needs
_OF_THIS_START = ("mode", "hydra/sweeper", "hydra/launcher")
_SECTIONS_OF_THIS_START = ("mode.", "hydra.sweeper.", "hydra.sweep.", "hydra.launcher.")


@dataclass(frozen=True, kw_only=True)
class Search:
    """How W&B chooses the values of the next trial.

    Attributes:
        objective: What a trial is judged by: a number of `summary.json` or a column of `metrics.csv`.
        direction: `minimize` or `maximize`.
        method: `grid`, `random` or `bayes`; None: `grid` where all values can be listed, else `bayes`.
        early_terminate: Validations after which W&B's Hyperband first stops trials; None: it stops none.
        num_trials: Of all agents; None: a grid's, or without end.
    """

    objective: str
    direction: str
    method: str | None = None
    early_terminate: int | None = None
    num_trials: int | None = None


def described(space: SearchSpace, search: Search, command: Sequence[str]) -> dict[str, Any]:
    """What `wandb sweep` takes.

    Args:
        space: What the trials differ in.
        search: How W&B searches it.
        command: As `command_of` makes it.

    Raises:
        ConfigError: W&B cannot search this space so.
    """
    method = search.method or (
        "grid" if all(map(_is_listed, space.parameters.values())) else "bayes"
    )
    content: dict[str, Any] = {
        "method": method,
        "metric": {"name": search.objective, "goal": search.direction},
        "parameters": {
            name_of(key): _parameter(key, parameter, method)
            for key, parameter in space.parameters.items()
        },
        "command": list(command),
    }
    if search.num_trials is not None:
        content["run_cap"] = search.num_trials
    if search.early_terminate is not None:
        content["metric"]["name"] = _series(search.objective)
        content["early_terminate"] = {"type": "hyperband", "min_iter": search.early_terminate}
    return content


def command_of(fixed: Sequence[str], *, flags: Sequence[str]) -> list[str]:
    """How an agent starts a trial: W&B fills in what stands in `${…}`.

    Args:
        fixed: Overrides that every trial is given.
        flags: Hydra's own.
    """
    return ["${env}", "${interpreter}", "${program}", *flags, *fixed, "${args_no_hyphens}"]


def fixed_words(words: Sequence[str]) -> list[str]:
    """Of the overrides that are typed for the description, those that each trial is given.

    Raises:
        ConfigError: A word would put all trials into one folder.
    """
    kept = []
    for word in words:
        key = parse_override(word).key_or_group
        if key == "hydra.run.dir" or (
            key == "resume" and word not in ("resume=null", "resume=auto")
        ):
            raise ConfigError(
                word,
                "all trials of the sweep would share that folder",
                f"{MODE_OF_SWEEPS} without it",
            )
        if key not in (*_OF_THIS_START, "resume") and not key.startswith(_SECTIONS_OF_THIS_START):
            kept.append(word)
    return kept


def name_of(key: str) -> str:
    """A key as the name of a W&B parameter: without its `+`, which `train.py` adds by itself where it can."""
    name = key.lstrip("+")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{key}=<a sweep>",
            "the names of W&B's parameters are letters, digits and _ . - only",
            f"{key}=<one value>, or the same sweep with python train.py -m",
        )
    return name


def _is_listed(parameter: Choice | Interval) -> bool:
    return isinstance(parameter, Choice) or parameter.step is not None


def _parameter(key: str, parameter: Choice | Interval, method: str) -> dict[str, Any]:
    if isinstance(parameter, Choice):
        pairs = zip(parameter.options, parameter.values, strict=True)
        return {"values": [_read_back(key, option, value) for option, value in pairs]}
    low, high = parameter.low, parameter.high
    if low == high:
        return {"value": low}
    if parameter.step is not None and (
        method == "grid" or parameter.step != 1 or not parameter.is_integer
    ):
        # W&B's own steps are multiples, whatever the lowest value is
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


def _read_back(key: str, option: str, value: Any) -> Any:
    """The value where Hydra reads what an agent makes of it, `key=<str of it>`, as the value; else the word."""
    typed = parse_override(f"{key}={option}")
    try:
        same = repr(parse_override(f"{key}={value}").value()) == repr(typed.value())
    except HydraException:
        same = False
    return value if same else option


def _listed(key: str, interval: Interval) -> list[int | float]:
    assert interval.step is not None, "only ranges are listed"
    num_values = (interval.high - interval.low) / interval.step
    if num_values > _MAX_VALUES:
        raise ConfigError(
            f"{key}=range({interval.low},{interval.high},{interval.step})",
            f"W&B would be told {num_values:.0f} values one by one",
            f"{key}=interval({interval.low},{interval.high})",
        )
    return interval.values()


def _series(objective: str) -> str:
    """What trials are compared by before their end."""
    if objective in _SERIES:
        return _SERIES[objective]
    if "/" in objective:
        return objective
    raise ConfigError(
        f"mode.early_terminate=… sweep.objective={objective}",
        "it is known only at the end of a trial",
        f"sweep.objective={_SERIES['val_loss']}",
    )
