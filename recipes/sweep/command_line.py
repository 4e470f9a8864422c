"""The words of a sweep, checked as those of its first job would be, before Hydra sees them."""

import importlib.util
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from recipes.config import compose_and_check
from recipes.config.check.command_line import compose_typed
from recipes.config.check.renamed import restore_sweeps
from recipes.config.compose import CONF, parse_override
from recipes.config.overrides import make_override
from recipes.errors import ConfigError

_GRID = "basic"


@dataclass(frozen=True, kw_only=True)
class SweepCommand:
    """What was typed for a sweep.

    Attributes:
        for_hydra: As Hydra takes them, with a `+` where one is needed (`trainer.benchmark=true,false`).
        keys: What is swept over.
        mistakes: All that the first of its jobs shows.
    """

    for_hydra: list[str]
    keys: list[str]
    mistakes: list[ConfigError]


def check_command(typed: Sequence[str], *, config_folder: Path, config_name: str) -> SweepCommand:
    """Compose and check the first job of a sweep."""
    where: dict[str, Any] = {"config_folder": config_folder, "config_name": config_name}
    swept = {word: override for word in typed if (override := _swept(word)) is not None}
    first = [_first_of(swept[word]) if word in swept else word for word in typed]
    composed, _ = compose_typed(first, **where)
    of_config = composed.sweep_overrides if composed is not None else []
    typed_keys = {word.lstrip("+").partition("=")[0] for word in typed}
    more = [
        _first_of(override)
        for override in map(parse_override, of_config)
        if override.key_or_group not in typed_keys
    ]
    params = [override.key_or_group for override in map(parse_override, of_config)]
    composed, mistakes = compose_and_check([*more, *first], **where)
    mistakes = restore_sweeps(mistakes, dict(zip(first, typed, strict=True)))
    added = set(composed.overrides) if composed is not None else set()
    sweeper = composed.choices["hydra/sweeper"] if composed is not None else _GRID
    for word in [word for word in swept if _is_empty(swept[word])]:
        mistakes.append(
            ConfigError(word, "there is nothing in it", f"{swept[word].key_or_group}=<values>")
        )
    for word, override in swept.items():
        if isinstance(override.value(), IntervalSweep) and sweeper == _GRID:
            fix = f"{override.get_key_element()}=<values with commas>, or hydra/sweeper=optuna"
            mistakes.append(ConfigError(word, "a grid takes single values", fix))
    if sweeper == "optuna" and importlib.util.find_spec("optuna") is None:
        fix = "pip install -e '.[optuna]'"
        mistakes.append(ConfigError("hydra/sweeper=optuna", "Optuna is not installed", fix))
    return SweepCommand(
        for_hydra=[
            _for_hydra(word, one, added, params) for word, one in zip(typed, first, strict=True)
        ],
        keys=[override.key_or_group for override in swept.values()],
        mistakes=mistakes,
    )


def _for_hydra(word: str, first: str, added: Collection[str], params: Collection[str]) -> str:
    """With a `+` where one is needed; without those that would make it another key beside the same of `sweep=`."""
    if word.lstrip("+").partition("=")[0] in params:
        return word.lstrip("+")
    return f"+{word}" if f"+{first}" in added else word


def _is_empty(override: Override) -> bool:
    value = override.value()
    if isinstance(value, RangeSweep):
        assert value.start is not None
        assert value.stop is not None
        return (value.stop - value.start) * value.step <= 0
    return isinstance(value, Glob) and not _options_of(override)


def _options_of(override: Override) -> list[str]:
    """The options of a group that a glob names."""
    value = override.value()
    assert isinstance(value, Glob)
    names = sorted(path.stem for path in (CONF / override.key_or_group).glob("*.yaml"))
    return [str(name) for name in value.filter(names)]


def _swept(word: str) -> Override | None:
    """The word as Hydra reads it; None where it is no sweep, or the check has to say what it is."""
    try:
        override = parse_override(word)
    except HydraException:
        return None
    return override if override.is_sweep_override() else None


def _first_of(override: Override) -> str:
    """The word of the first job; of an interval its lower end, and as it is where it is no sweep."""
    if not override.is_sweep_override():
        return str(override.input_line)
    value = override.value()
    if isinstance(value, IntervalSweep):
        return f"{override.get_key_element()}={value.start}"
    if isinstance(value, Glob):
        return f"{override.get_key_element()}={next(iter(_options_of(override)), 'none')}"
    if isinstance(value, RangeSweep) and _is_empty(override):
        return f"{override.get_key_element()}={value.start}"
    return f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"


# about how the jobs are carried out: the same job by others
_NOT_OF_A_JOB = ("launcher", "hydra", "ignore_slurm")


_NOT_OF_A_JOB_EITHER = tuple(
    f"sweep.{name}"
    for name in (
        "objective",
        "direction",
        "retry_failed",
        "skip_invalid",
        "compare",
        "dashboard",
    )
)


def job_overrides(overrides: Sequence[str]) -> list[str]:
    """What makes a job what it is, whoever carries it out and wherever."""
    # Hydra's grid says what is to be deleted with a value
    plain = [word.removesuffix("=null") if word.startswith("~") else word for word in overrides]
    return [word for word in plain if not _is_of_the_sweep(word)]


def command_of(overrides: Sequence[str]) -> str:
    """The command that trains it again, alone."""
    alone = ["hydra.mode=RUN"] if any(word.startswith("sweep=") for word in overrides) else []
    return f"python train.py {shlex.join([*overrides, *alone])}"


def resume_command(typed: Sequence[str], folder: Path) -> str:
    """The command that goes on with a sweep."""
    kept = [word for word in typed if not word.startswith("hydra.sweep.dir=")]
    return f"python train.py {shlex.join([*kept, make_override('hydra.sweep.dir', str(folder))])}"


def _is_of_the_sweep(word: str) -> bool:
    key = word.lstrip("+~").partition("=")[0].partition("@")[0]
    room = key.partition(".")[0].partition("/")[0]
    return room in _NOT_OF_A_JOB or key.startswith(_NOT_OF_A_JOB_EITHER)
