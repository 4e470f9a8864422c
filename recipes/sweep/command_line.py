"""Check the command line of a sweep through its first job before Hydra runs; build the commands that it prints."""

import importlib.util
import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from recipes.config import compose_and_check
from recipes.config.check.command_line import compose_overrides, parse_or_quote
from recipes.config.check.renamed import answer_renamed_option, restore_sweeps
from recipes.config.check.suggestions import list_options, suggest_option
from recipes.config.compose import CONF
from recipes.config.overrides import make_override, parse_override
from recipes.errors import ConfigError
from recipes.launcher.job import JOB_FILE
from recipes.run_folder import PAGE_FILE, SWEEP_FILE, has_run, is_page, may_replace

_GRID = "basic"  # Hydra's own sweeper
# sections and settings that determine how and where jobs run, not what they compute
_LAUNCH_SECTIONS = ("launcher", "hydra", "ignore_slurm")
_SWEEP_SETTINGS = (
    "sweep.objective",
    "sweep.direction",
    "sweep.retry_failed",
    "sweep.skip_invalid",
    "sweep.compare",
    "sweep.dashboard",
)


@dataclass(frozen=True, kw_only=True)
class SweepCommand:
    """The checked command line of a sweep.

    Attributes:
        for_hydra: The overrides for Hydra, with a `+` where Hydra needs one (`trainer.benchmark=true,false`).
        keys: The keys that are swept over.
        mistakes: All errors found in the first job.
    """

    for_hydra: list[str]
    keys: list[str]
    mistakes: list[ConfigError]


def check_command(typed: Sequence[str], *, config_folder: Path, config_name: str) -> SweepCommand:
    """Compose and check the first job of a sweep.

    Args:
        typed: The overrides of the command line.
        config_folder: The folder from which jobs are composed.
        config_name: The primary config.
    """
    source: dict[str, Any] = {"config_folder": config_folder, "config_name": config_name}
    typed = [parse_or_quote(text)[1] for text in typed]  # quote what Hydra's grammar cannot read, as for a single run
    swept = {text: parsed for text in typed if (parsed := _parse_sweep(text)) is not None}
    first_job = [_first_value(swept[text], typed) if text in swept else text for text in typed]
    composed, _ = compose_overrides(first_job, **source)
    params = [parse_override(text) for text in composed.sweep_overrides] if composed else []
    typed_keys = {_key(text) for text in typed}
    # typed overrides replace those of hydra.sweeper.params
    from_params = [_first_value(param, typed) for param in params if param.key_or_group not in typed_keys]
    composed, mistakes = compose_and_check([*from_params, *first_job], **source)
    mistakes = restore_sweeps(mistakes, dict(zip(first_job, typed, strict=True)))
    sweeper = composed.choices["hydra/sweeper"] if composed is not None else _GRID
    added = set(composed.overrides) if composed is not None else set()
    param_keys = {param.key_or_group for param in params}
    return SweepCommand(
        for_hydra=[_to_hydra(text, first, added, param_keys) for text, first in zip(typed, first_job, strict=True)],
        keys=[override.key_or_group for override in swept.values()],
        mistakes=[*mistakes, *_check_values(swept, typed), *_check_sweeper(swept, sweeper), *_check_folder(typed)],
    )


def job_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that identify a job, without those about how and where the sweep runs."""
    # Hydra's grid writes a deletion as `~key=null`
    plain = [text.removesuffix("=null") if text.startswith("~") else text for text in overrides]
    return [text for text in plain if not _is_about_sweep(text)]


def train_command(overrides: Sequence[str]) -> str:
    """Return the command that runs one job of a sweep on its own."""
    single = ["hydra.mode=RUN"] if any(text.startswith("sweep=") for text in overrides) else []
    return f"python train.py {shlex.join([*overrides, *single])}"


def resume_command(typed: Sequence[str], folder: Path) -> str:
    """Return the command that resumes a sweep.

    Args:
        typed: The overrides the sweep was started with.
        folder: The sweep's folder.
    """
    others = [text for text in typed if not text.startswith("hydra.sweep.dir=")]
    return f"python train.py {shlex.join([*others, make_override('hydra.sweep.dir', str(folder))])}"


def _parse_sweep(text: str) -> Override | None:
    """Parse an override; None if it is not a sweep, or is invalid, which the check reports."""
    try:
        override = parse_override(text)
    except HydraException:
        return None
    return override if override.is_sweep_override() else None


def _first_value(override: Override, typed: Sequence[str]) -> str:
    """Return the override of the first job: the first value, or the lower end of an interval.

    Args:
        override: Override of one key, swept or not.
        typed: The overrides of the command line.
    """
    if not override.is_sweep_override():
        return str(override.input_line)
    key, sweep = override.get_key_element(), override.value()
    if isinstance(sweep, IntervalSweep) or (isinstance(sweep, RangeSweep) and _is_empty(override, typed)):
        return f"{key}={sweep.start}"
    if isinstance(sweep, Glob):
        return f"{key}={next(iter(_matching_options(override, typed)), 'none')}"
    return f"{key}={next(iter(override.sweep_string_iterator()))}"


def _check_values(swept: dict[str, Override], typed: Sequence[str]) -> list[ConfigError]:
    """Check that each sweep has a value, and that the options of a swept group exist."""
    mistakes = []
    for text, override in swept.items():
        group = override.key_or_group
        if _is_empty(override, typed):
            mistakes.append(ConfigError(text, "the sweep has no values", f"{group}=<values>"))
        elif (CONF / group).is_dir() and isinstance(override.value(), ChoiceSweep):
            options = list_options(group, typed)
            # the check of the first job has reported its own option
            unknown = [name for name in list(override.sweep_string_iterator())[1:] if name.strip("'") not in options]
            renamed = answer_renamed_option(text)
            if unknown and renamed is not None:
                mistakes.append(renamed)
                continue
            reason = f"the options are {' '.join(options)}"
            mistakes += [ConfigError(f"{group}={name}", reason, suggest_option(group, name, typed)) for name in unknown]
    return mistakes


def _check_sweeper(swept: dict[str, Override], sweeper: str) -> list[ConfigError]:
    """Check that the sweeper can run these sweeps, and is installed."""
    mistakes = []
    for text, override in swept.items():
        if isinstance(override.value(), IntervalSweep) and sweeper == _GRID:
            fix = f"{override.get_key_element()}=<values with commas>, or hydra/sweeper=optuna"
            mistakes.append(ConfigError(text, "a grid needs single values", fix))
    if sweeper == "optuna" and importlib.util.find_spec("optuna") is None:
        fix = "pip install -e '.[optuna]'"
        mistakes.append(ConfigError("hydra/sweeper=optuna", "Optuna is not installed", fix))
    return mistakes


def _check_folder(typed: Sequence[str]) -> list[ConfigError]:
    """Check that the sweep folder can be created, which Hydra does before any code of this project runs."""
    setting = next((text for text in reversed(typed) if _key(text) == "hydra.sweep.dir"), None)
    folder = parse_override(setting).value() if setting is not None else "logs/sweep"
    if not isinstance(folder, str) or "${" in folder:
        return []  # checked when it is resolved
    nearest = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if os.path.exists(path))
    fix = "hydra.sweep.dir=<a folder of yours>"
    if not nearest.is_dir():
        return [ConfigError(setting or f"hydra.sweep.dir={folder}", f"{nearest} is a file", fix)]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [ConfigError(setting or f"hydra.sweep.dir={folder}", f"{nearest} cannot be written to", fix)]
    if (reason := _find_other_owner(Path(folder))) is not None:
        return [ConfigError(setting or f"hydra.sweep.dir={folder}", reason, "hydra.sweep.dir=<another folder>")]
    return []


def _find_other_owner(folder: Path) -> str | None:
    """Return why a sweep would replace files of something else in a folder; None if it would not."""
    if has_run(folder):
        return "it is the folder of a run, whose report this sweep would replace"
    if any(any(folder.glob(f"{below}/{JOB_FILE}")) for below in ("*", "*/*")):
        return None  # an earlier sweep, which this one continues or adds jobs to
    is_own = {PAGE_FILE: is_page, SWEEP_FILE: lambda text: text.startswith("job,state,exit_code,")}
    is_own |= {"multirun.yaml": lambda text: text.startswith("hydra:")}
    found = [name for name, is_own_text in is_own.items() if not may_replace(folder / name, is_own_text)]
    return f"it holds {found[0]}, which is of no sweep, and which this one would replace" if found else None


def _is_empty(override: Override, typed: Sequence[str]) -> bool:
    sweep = override.value()
    if isinstance(sweep, RangeSweep):
        assert sweep.start is not None, "Hydra's range has a start"
        assert sweep.stop is not None, "Hydra's range has an end"
        return (sweep.stop - sweep.start) * sweep.step <= 0
    return isinstance(sweep, Glob) and not _matching_options(override, typed)


def _matching_options(override: Override, typed: Sequence[str]) -> list[str]:
    """Return the options of a config group that match a glob."""
    glob = override.value()
    assert isinstance(glob, Glob), override.input_line
    return [str(option) for option in glob.filter(list_options(override.key_or_group, typed))]


def _to_hydra(text: str, first: str, added: Collection[str], param_keys: Collection[str]) -> str:
    """Return an override with the `+` that Hydra needs.

    A key that `hydra.sweeper.params` also has loses its `+`: Hydra compares keys as text, and with
    the `+` it would sweep over both.
    """
    if _key(text) in param_keys:
        return text.lstrip("+")
    return next((f"{marks}{text}" for marks in ("+", "++") if f"{marks}{first}" in added), text)


def _is_about_sweep(text: str) -> bool:
    key = text.lstrip("+~").partition("=")[0].partition("@")[0]
    section = key.partition(".")[0].partition("/")[0]
    return section in _LAUNCH_SECTIONS or key.startswith(_SWEEP_SETTINGS)


def _key(text: str) -> str:
    return text.lstrip("+").partition("=")[0]
