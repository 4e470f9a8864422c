"""Check the command line of a sweep through its first job before Hydra runs; build the commands that it prints."""

import importlib.util
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.config import compose_and_check
from recipes.config.cached_compose import compose_overrides
from recipes.config.check.command_line import compose_typed, join_words, restore_typed
from recipes.config.check.metrics import find_unknown_metric, is_loss_validated
from recipes.config.check.nodes import check_node_tree
from recipes.config.check.ranges import check_ranges
from recipes.config.check.renamed import answer_renamed, restore_sweeps
from recipes.config.check.suggestions import list_options, read_option, suggest_option
from recipes.config.check.text_values import decimal_point
from recipes.config.commands import repeat_command
from recipes.config.compose import CONF, MODE_OF_SWEEPS, Composed
from recipes.config.instantiate import OPTUNA, PLUGINS
from recipes.config.local_path import find_address
from recipes.config.overrides import (
    count_unclosed,
    for_shell,
    is_about_sweep,
    make_override,
    parse_or_quote,
    parse_override,
    quote,
)
from recipes.config.resolved import ResolvedRun
from recipes.config.search_path import find_config_folders
from recipes.config.signature import TargetNotFoundError, read_signature
from recipes.config.traits import select
from recipes.errors import ConfigError, type_extra
from recipes.launcher.job import JOB_FILE
from recipes.run_folder import PAGE_FILE, SWEEP_FILE, has_run, is_page, may_replace
from recipes.sweep.search_space import read_space

_GRID = "basic"  # Hydra's own sweeper
_OBJECTIVE = "best_val_loss"  # of conf/sweep/none.yaml
_PARAMS = "hydra.sweeper.params"
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
_MAX_JOBS = 5000  # of a grid, each of which is composed and checked in some 30 ms
_MAX_NAME_BYTES = 255  # of file systems


@dataclass(frozen=True, kw_only=True)
class SweepCommand:
    """The checked command line of a sweep.

    Attributes:
        for_hydra: The overrides for Hydra, with a `+` where Hydra needs one (`trainer.benchmark=true,false`).
        keys: The keys that are swept over.
        mistakes: All errors found in the first job, and those of the sweep.
        of_sweep: The errors of the sweep, which every job has.
        skips_invalid: Whether the valid jobs run when the config of others is invalid.
        ranking: The objective and its direction, where those of the checkpoints decide them.
    """

    for_hydra: list[str]
    keys: list[str]
    mistakes: list[ConfigError]
    of_sweep: list[ConfigError]
    skips_invalid: bool = False
    ranking: Sequence[str] = ()


def check_command(typed: Sequence[str], *, config_folder: Path, config_name: str) -> SweepCommand:
    """Compose and check the first job of a sweep.

    Args:
        typed: The overrides of the command line.
        config_folder: The folder from which jobs are composed.
        config_name: The primary config.
    """
    source: dict[str, Any] = {"config_folder": config_folder, "config_name": config_name}
    typed, mistakes = join_words(typed)
    if mistakes := [*mistakes, *_reject_mode(typed), *_reject_params(typed), *_reject_slips(typed)]:
        return SweepCommand(for_hydra=[*typed], keys=[], mistakes=mistakes, of_sweep=mistakes)
    as_typed, typed = typed, [parse_or_quote(text, sweeps=True)[1] for text in typed]
    swept = {text: parsed for text in typed if (parsed := _parse_sweep(text)) is not None}
    first_job = [_first_value(swept[text], typed) if text in swept else text for text in typed]
    composed, _ = compose_typed(first_job, **source)
    params = [parse_override(text) for text in composed.sweep_overrides] if composed else []
    typed_keys = {_key(text) for text in typed}
    # typed overrides replace those of hydra.sweeper.params
    params_left = [param for param in params if param.key_or_group not in typed_keys]
    from_params = [_first_value(param, typed) for param in params_left]
    sweeper = composed.choices["hydra/sweeper"] if composed is not None else _GRID
    of_sweeper = _check_sweeper_node(composed) if composed is not None else []
    composed, mistakes = compose_and_check([*from_params, *first_job], **source)
    mistakes = restore_sweeps(mistakes, dict(zip(first_job, typed, strict=True)))
    mistakes = [_answer_interval(mistake, swept) for mistake in mistakes]
    mistakes = _locate_params(mistakes, dict(zip(from_params, params_left, strict=True)), typed)
    added = set(composed.overrides) if composed is not None else set()
    param_keys = {param.key_or_group for param in params}
    of_space = _check_space([*params_left, *swept.values()]) if sweeper == "optuna" else []
    settings_of_space = [mistake.setting for mistake in of_space]
    wrong_keys = {_key(mistake.setting) for mistake in of_space}  # whose first value is a consequence
    # and so is that of a glob without options
    wrong_keys |= {_key(text) for text, override in swept.items() if _is_empty(override, typed)}
    wrong_keys |= {_key(mistake.setting) for mistake in _check_resume(typed)}
    mistakes = [mistake for mistake in mistakes if _key(mistake.setting) not in wrong_keys]
    of_sweep = [
        *(mistake for mistake in mistakes if is_about_sweep(mistake.setting.removeprefix("no "))),
        *(mistake for mistake in _check_values(swept, typed) if mistake.setting not in settings_of_space),
        *of_space,
        *_check_sweeper(swept, sweeper),
        *of_sweeper,
        *_check_number(swept, params, sweeper, typed),
        *(_check_objective(composed) if composed is not None else []),
        *_check_folder(typed),
        *_check_run_folder(typed),
        *_check_resume(typed),
        *_check_replaced(params, params_left, swept, typed),
        *(_check_devices_per_job(composed, swept) if composed is not None else []),
    ]
    of_jobs = [mistake for mistake in mistakes if mistake not in of_sweep]
    shown = restore_typed([*of_jobs, *of_sweep], as_typed, sweeps=True)
    return SweepCommand(
        for_hydra=[_to_hydra(text, first, added, param_keys) for text, first in zip(typed, first_job, strict=True)],
        keys=[override.key_or_group for override in swept.values()],
        mistakes=shown,
        of_sweep=shown[len(of_jobs) :],
        skips_invalid=composed is not None and select(composed.config, "sweep.skip_invalid") is True,
        ranking=_rank_as_checkpoints(composed, typed_keys) if composed is not None else (),
    )


def job_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that identify a job, without those about how and where the sweep runs."""
    # Hydra's grid writes a deletion as `~key=null`
    plain = [text.removesuffix("=null") if text.startswith("~") else text for text in overrides]
    return [text for text in plain if not is_about_sweep(text)]


def train_command(overrides: Sequence[str]) -> str:
    """Return the command that runs one job of a sweep on its own."""
    single = ["hydra.mode=RUN"] if any(text.startswith("sweep=") for text in overrides) else []
    return repeat_command([*overrides, *single])


def resume_command(typed: Sequence[str], folder: Path) -> str:
    """Return the command that resumes a sweep.

    Args:
        typed: The overrides the sweep was started with.
        folder: The sweep's folder.
    """
    others = [text for text in typed if not text.startswith("hydra.sweep.dir=")]
    return repeat_command([*others, make_override("hydra.sweep.dir", str(folder))])


def _reject_mode(typed: Sequence[str]) -> Iterator[ConfigError]:
    """Reject the mode that writes a sweep for W&B, whose overrides are those of that sweep."""
    if MODE_OF_SWEEPS in typed:
        yield ConfigError(
            f"-m {MODE_OF_SWEEPS}", "it writes one file for the whole sweep", "the same command without -m"
        )


def _reject_params(typed: Sequence[str]) -> Iterator[ConfigError]:
    """Reject parameters of the sweeper on the command line, where each is an override of its own."""
    for text in typed:
        if _key(text).startswith(_PARAMS):
            parameter = text.lstrip("+").removeprefix(f"{_PARAMS}.")
            fix = parameter if parameter != text.lstrip("+") else "<setting>=<value>,<value>"
            yield ConfigError(text, "it is for files of conf/sweep/; a command line has the sweeps themselves", fix)


def _reject_slips(typed: Sequence[str]) -> Iterator[ConfigError]:
    """Reject what is read as other values than those that are meant: a decimal comma, an open parenthesis."""
    for text in typed:
        key, _, value = text.partition("=")
        if re.fullmatch(r"-?\d+,0\d+", value):  # nobody writes a number 001
            yield ConfigError(text, "a comma separates the values of a sweep", decimal_point(text))
        elif missing := count_unclosed(value):
            yield ConfigError(text, "a parenthesis is missing", for_shell(f"{key}={value}{')' * missing}"))


def _answer_interval(mistake: ConfigError, swept: Mapping[str, Override]) -> ConfigError:
    """Return the error of an interval in a setting of whole numbers, which a range has; any other as it is."""
    for text, override in swept.items():
        sweep = override.value()
        is_its_key = _key(text) == _key(mistake.setting)
        if is_its_key and isinstance(sweep, IntervalSweep) and "whole number" in mistake.reason:
            assert sweep.start is not None, "Hydra's interval has a start"
            assert sweep.end is not None, "Hydra's interval has an end"
            numbers = f"range({math.ceil(sweep.start)},{math.floor(sweep.end) + 1})"
            value = f"tag(log,{numbers})" if "log" in sweep.tags else numbers
            reason = "it takes a whole number, and an interval has any number"
            return ConfigError(text, reason, for_shell(f"{_key(text)}={value}"))
    return mistake


def _check_resume(typed: Sequence[str]) -> Iterator[ConfigError]:
    """Reject `resume=auto`: each job of a sweep resumes in its own folder."""
    if "resume=auto" in typed:
        reason = "the jobs of a sweep resume by themselves, in the folder of the sweep"
        yield ConfigError("resume=auto", reason, "hydra.sweep.dir=<the folder of that sweep> instead of it")


def _check_replaced(
    params: Sequence[Override], left: Sequence[Override], swept: Mapping[str, Override], typed: Sequence[str]
) -> Iterator[ConfigError]:
    """Check that typed values leave a sweep something to try."""
    if any(param.is_sweep_override() for param in params) and not left and not swept:
        keys = [param.key_or_group for param in params]
        replacing = [text for text in typed if _key(text) in keys]
        fix = f"the same command without {' '.join(replacing)}, or {keys[0]}=<values with commas>"
        yield ConfigError(" ".join(replacing), "a typed value replaces all those that the sweep tries", fix)


def _check_devices_per_job(composed: Composed, swept: Mapping[str, Override]) -> Iterator[ConfigError]:
    """Check that the devices of a job are used: `strategy=single` has one."""
    wanted = select(composed.config, "launcher.devices_per_job")
    is_swept = any(override.key_or_group in ("strategy", "recipe") for override in swept.values())
    if isinstance(wanted, int) and wanted > 1 and not is_swept and composed.choices.get("strategy") == "single":
        reason = "strategy=single uses one device"
        yield ConfigError(f"launcher.devices_per_job={wanted}", reason, "launcher.devices_per_job=1, or strategy=ddp")


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
    if isinstance(sweep, IntervalSweep | RangeSweep):
        return f"{key}={sweep.start}"
    if isinstance(sweep, Glob):
        return f"{key}={next(iter(_matching_options(override, typed)), 'none')}"
    return f"{key}={next(iter(override.sweep_string_iterator()))}"


def _check_values(swept: dict[str, Override], typed: Sequence[str]) -> list[ConfigError]:
    """Check that each sweep has a value, and that the options of a swept group exist."""
    mistakes = []
    for text, override in swept.items():
        group = override.key_or_group
        if is_about_sweep(group) or group == "sweep":
            quoted = f"{group}={quote(text.partition('=')[2])}"
            names = " | ".join(name for name in list_options(group, typed) if f"{group}={name}" != "sweep=none")
            fix = f'"{quoted}"' if group in _FOLDERS else f"{group}=<{names or 'value'}>"
            mistakes.append(ConfigError(text, "it is a setting of the whole sweep, in which jobs cannot differ", fix))
        elif _never_ends(override):
            mistakes.append(ConfigError(text, "the range never ends", f"'{group}=range(<low>,<high>,<step>)'"))
        elif _is_empty(override, typed):
            reason, fix = "the sweep has no values", f"{group}=<values>"
            if isinstance(override.value(), Glob):
                options = list_options(group, typed)
                reason, fix = f"no option matches: they are {' '.join(options)}", f"{group}=<options with commas>"
            mistakes.append(ConfigError(text, reason, fix))
        elif (CONF / group).is_dir() and isinstance(override.value(), ChoiceSweep):
            options = list_options(group, typed)
            # the check of the first job has reported its own option
            unknown = [name for name in list(override.sweep_string_iterator())[1:] if name.strip("'") not in options]
            renamed = answer_renamed(text)
            if unknown and renamed is not None:
                mistakes.append(renamed)
                continue
            reason = f"the options are {' '.join(options)}"
            mistakes += [ConfigError(f"{group}={name}", reason, suggest_option(group, name, typed)) for name in unknown]
    return mistakes


def _check_space(sweeps: Sequence[Override]) -> list[ConfigError]:
    """Check the search space of a study as the sweeper reads it; a glob's options are those of its group."""
    texts = [str(override.input_line) for override in sweeps if not isinstance(override.value(), Glob)]
    return read_space(texts)[1]


def _locate_params(
    mistakes: Sequence[ConfigError], params: Mapping[str, Override], typed: Sequence[str]
) -> list[ConfigError]:
    """Return the errors in `hydra.sweeper.params`, which nobody has typed, with the file and line to correct.

    Args:
        mistakes: Errors found in the first job.
        params: Parameter by its override of the first job.
        typed: The overrides of the command line.
    """
    located = []
    for mistake in mistakes:
        key = _key(mistake.setting)
        first = next((text for text in params if _key(text) == key), None)
        if first is not None and (place := _find_param(key, typed)):
            whole, value = str(params[first].input_line), first.partition("=")[2]
            other, _, wanted = mistake.fix.partition("=")
            is_other_key = wanted == value and other != key
            fix = f"{other}: {whole.partition('=')[2]}" if is_other_key else mistake.fix
            if mistake.reason.startswith("it takes ") and value[:1] == "[":
                fix = f"{key}: {value[1:-1].replace(' ', '')}"
                reason = f"{mistake.reason}, and a list is one value: commas alone separate those of a sweep"
                mistake = ConfigError(mistake.setting, reason, fix)
            mistake = ConfigError(whole if is_other_key else mistake.setting, mistake.reason, f"{fix} (in {place})")
        located.append(mistake)
    return located


def _find_param(key: str, typed: Sequence[str]) -> str | None:
    """Return the file and line of a sweep's option that sets a parameter; None if it is not one line."""
    entry = re.compile(rf"\s+{re.escape(key)}\s*:")
    found = [
        f"{file}, line {number}"
        for folder in find_config_folders(typed)
        for file in sorted((folder / "sweep").glob("*.yaml"))
        for number, line in enumerate(file.read_text(encoding="utf-8-sig", errors="replace").splitlines(), start=1)
        if entry.match(line) and any(text == f"sweep={file.stem}" for text in typed)
    ]
    return found[0] if len(found) == 1 else None


def _check_sweeper(swept: dict[str, Override], sweeper: str) -> list[ConfigError]:
    """Check that the sweeper can run these sweeps, and is installed."""
    mistakes = []
    for text, override in swept.items():
        if isinstance(override.value(), IntervalSweep) and sweeper == _GRID:
            fix = f"hydra/sweeper=optuna {for_shell(text)}, or {override.get_key_element()}=<values with commas>"
            mistakes.append(ConfigError(text, "a grid needs single values", fix))
    if sweeper == "optuna" and importlib.util.find_spec("optuna") is None:
        fix = type_extra("optuna")
        mistakes.append(ConfigError("hydra/sweeper=optuna", "Optuna is not installed", fix))
    return mistakes


def _check_sweeper_node(composed: Composed) -> list[ConfigError]:
    """Check `hydra.sweeper`, which Hydra builds before any code of this project runs, as any other section."""
    node = compose_overrides(composed.overrides, Path(composed.config_folder), composed.config_name)
    try:
        section: Any = OmegaConf.to_container(node.hydra.sweeper, resolve=True)
    except OmegaConfBaseException as error:
        return [ConfigError("hydra.sweeper=…", str(error).partition("\n")[0], "hydra.sweeper.<setting>=<value>")]
    if str(section.get("_target_", "")).startswith(PLUGINS):
        section["_target_"] = OPTUNA
    config = {"hydra": {"sweeper": section}}
    found = [_answer_plugin(mistake) for mistake in (*check_node_tree(config), *check_ranges(config))]
    mistakes = [mistake for mistake in found if not mistake.setting.startswith(_PARAMS)]  # those of a job are checked
    if section["_target_"] == OPTUNA and section.get("pruner") is not None and not mistakes:
        mistakes += [*find_unknown_metric(composed.config, "hydra.sweeper.prune_on", section["prune_on"])]
    return mistakes


def _answer_plugin(mistake: ConfigError) -> ConfigError:
    """Return the error in a sampler or pruner given as the name of Optuna's class, with what makes it that class."""
    key, _, value = mistake.setting.partition("=")
    module = {"hydra.sweeper.sampler": "optuna.samplers", "hydra.sweeper.pruner": "optuna.pruners"}.get(key)
    target = f"{module}.{value.rpartition('.')[2]}"
    try:
        taken = read_signature(target).parameters if module else None
    except TargetNotFoundError:
        taken = None
    if taken is None:
        return mistake
    section = read_option("hydra/sweeper", "optuna", ())[key.rpartition(".")[2]]
    surplus = [f"'~{key}.{name}'" for name in section if not name.startswith("_") and name not in taken]
    return ConfigError(mistake.setting, mistake.reason, " ".join([f"{key}._target_={target}", *surplus]))


def _check_number(
    swept: Mapping[str, Override], params: Sequence[Override], sweeper: str, typed: Sequence[str]
) -> list[ConfigError]:
    """Check the number of jobs of a grid: Hydra composes all of them before the first one starts."""
    sweeps = {override.key_or_group: override for override in [*params, *swept.values()]}
    number = math.prod(_count_values(override, typed) for override in sweeps.values())
    if sweeper != _GRID or number <= _MAX_JOBS:
        return []
    reason = f"the grid has {number:,} jobs, and all of them are composed and checked before the first one starts"
    fix = "hydra/sweeper=optuna hydra.sweeper.n_trials=100, which samples them, or fewer values"
    return [ConfigError(" ".join(swept) or "hydra.sweeper.params=…", reason, fix)]


def _count_values(override: Override, typed: Sequence[str]) -> int:
    sweep = override.value()
    if isinstance(sweep, RangeSweep) and not _never_ends(override) and not _is_empty(override, typed):
        assert sweep.start is not None, "Hydra's range has a start"
        assert sweep.stop is not None, "Hydra's range has an end"
        return math.ceil((Decimal(sweep.stop) - Decimal(sweep.start)) / Decimal(sweep.step))
    if isinstance(sweep, ChoiceSweep):
        return len(sweep.list)
    return max(1, len(_matching_options(override, typed))) if isinstance(sweep, Glob) else 1


def _check_objective(composed: Composed) -> list[ConfigError]:
    """Check that a validation metric that ranks the jobs is computed; other names are those of summary.json."""
    objective = str(select(composed.config, "sweep.objective"))
    return [*find_unknown_metric(composed.config, "sweep.objective", objective)] if "/" in objective else []


def _rank_as_checkpoints(composed: ResolvedRun, typed_keys: Collection[str]) -> list[str]:
    """Return the objective that the metric of the best checkpoint is, of runs whose loss cannot rank them.

    A LightningModule of one's own logs what it likes, so nothing but this setting, if it is typed, says what is good;
    of completions, which have no validation loss, it is a reward.
    """
    monitor, mode = (str(select(composed.config, f"checkpoint.{name}")) for name in ("monitor", "mode"))
    is_typed = any(text.lstrip("+").startswith("checkpoint.monitor=") for text in composed.overrides)
    is_decided = "sweep.objective" in typed_keys or select(composed.config, "sweep.objective") != _OBJECTIVE
    is_own = composed.task.has_own_training and is_typed
    if is_decided or not (is_own or not is_loss_validated(composed.config)):
        return []
    direction = [] if "sweep.direction" in typed_keys else [f"sweep.direction={mode}imize"]
    return [make_override("sweep.objective", monitor), *direction]


def _check_run_folder(typed: Sequence[str]) -> Iterator[ConfigError]:
    """Reject the folder of a single run: the jobs of a sweep have theirs below that of the sweep."""
    for text in typed:
        key, _, value = text.partition("=")
        if key == "hydra.run.dir" and _parse_sweep(text) is None:
            yield ConfigError(text, "it is the folder of one run, and a sweep has several", f"hydra.sweep.dir={value}")


def _check_folder(typed: Sequence[str]) -> list[ConfigError]:
    """Check that the sweep folder can be created, which Hydra does before any code of this project runs."""
    setting = next((text for text in reversed(typed) if _key(text) == "hydra.sweep.dir"), None)
    folder = parse_override(setting).value() if setting is not None else "logs/sweep"
    if folder == "":
        return [ConfigError("hydra.sweep.dir=", "a sweep needs a folder", "hydra.sweep.dir=<folder>")]
    if not isinstance(folder, str) or "${" in folder:
        return []  # checked when it is resolved
    if address := find_address("hydra.sweep.dir", folder):
        return [address]
    folder = os.path.expanduser(folder)
    if folder.startswith("~"):
        return [ConfigError(str(setting), "there is no such user", "hydra.sweep.dir=<a folder>")]
    if any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in Path(folder).parts):
        reason = f"a name in it is longer than {_MAX_NAME_BYTES} bytes"
        return [ConfigError("hydra.sweep.dir=…", reason, "hydra.sweep.dir=<a shorter name>")]
    nearest = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if os.path.exists(path))
    fix = "hydra.sweep.dir=<a folder of yours>"
    if not nearest.is_dir():
        return [ConfigError(setting or f"hydra.sweep.dir={folder}", f"{nearest} is a file", fix)]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [ConfigError(setting or f"hydra.sweep.dir={folder}", f"{nearest} cannot be written to", fix)]
    if (owner := _find_other_owner(Path(folder))) is not None:
        return [ConfigError(setting or f"hydra.sweep.dir={folder}", owner, "hydra.sweep.dir=<another folder>")]
    return []


def _never_ends(override: Override) -> bool:
    sweep = override.value()
    if not isinstance(sweep, RangeSweep):
        return False
    return sweep.step == 0 or not all(math.isfinite(number or 0) for number in (sweep.start, sweep.stop, sweep.step))


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
    if _key(text) == "hydra.sweep.dir" and str(folder := parse_override(text).value()).startswith("~"):
        return make_override(_key(text), os.path.expanduser(str(folder)))  # Hydra would create a folder of the name ~
    if _key(text) in param_keys:
        return text.lstrip("+")
    return next((f"{marks}{text}" for marks in ("+", "++") if f"{marks}{first}" in added), text)


def _key(text: str) -> str:
    return text.lstrip("+").partition("=")[0]
