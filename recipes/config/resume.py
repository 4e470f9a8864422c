"""Read the run that `resume=` names: its frozen config and the overrides that still apply. Imports no torch."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.config.cached_compose import compose_options, compose_overrides, select_options
from recipes.config.inferred import infer_overrides
from recipes.config.overrides import for_shell, parse_override, unescape_interpolations
from recipes.config.search_path import select_search_path
from recipes.config.traits import read_adapter
from recipes.config.trust import SEARCH_PATH, find_own_folders, find_resumed_run
from recipes.errors import ConfigError, shell
from recipes.run_folder import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    TOKENIZER_FOLDER,
    find_run_folder,
    read_config,
    read_environment,
)

Config = dict[str, Any]
_SINGLE_START = ("hydra.", "mode.", "evaluator.")  # sections that apply to a single start of a run
_NEEDED = ("model", "data", "task", "trainer", "optimizer", "strategy", "precision")  # of every run there has been
# of recorded overrides: a line of a shell has more, and each is parsed in milliseconds
_MOST_OVERRIDES, _MOST_CHARACTERS = 1_000, 100_000
_MOST_SHOWN = 80


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """A run to continue.

    Attributes:
        folder: Its run folder.
        config: Its frozen config, every interpolation resolved.
        overrides: Overrides it was started with, except those that apply to a single start; the typed search path comes
            first, without which they may not compose.
        search_path: Overrides of the search path that it was started with.
    """

    folder: Path
    config: Config
    overrides: list[str]
    search_path: list[str]


def read_resumed_run(overrides: Sequence[str], config_folder: Path, name: str | None) -> ResumedRun | None:
    """Read the run that `resume=` names; None if there is no `resume=` or it names no run.

    Without a record of its overrides, they are inferred from its frozen config.

    Args:
        overrides: Overrides of this start.
        config_folder: Folder of the YAML files.
        name: Primary config, without its suffix.

    Raises:
        ConfigError: A file of the run is damaged.
    """
    folder = find_resumed_run(overrides)
    if folder is None:
        return None
    config = unescape_interpolations(read_config(folder))
    missing = [key for key in _NEEDED if not isinstance(config.get(key), dict)]
    if missing:
        reason = f"it has no section {missing[0]}"
        fix = f"a copy of the {CONFIG_FILE} that the run wrote, or a new run without this folder"
        raise ConfigError(str(folder / CONFIG_FILE), reason, fix)
    search_path = select_search_path(overrides)
    recorded = _read_overrides(folder)
    if recorded is None:
        recorded = infer_overrides(config, search_path, config_folder, name)
    return ResumedRun(
        folder=folder,
        config=config,
        overrides=[*search_path, *filter(_outlasts_a_start, recorded)],
        search_path=select_search_path(recorded),
    )


def select_inherited(
    resumed: ResumedRun, typed: Sequence[str], folder: Path, name: str | None
) -> tuple[list[str], list[str]]:
    """Split the overrides of a resumed run into those that still apply and those that do not.

    An override that is typed again is replaced. An override in a section whose `_target_` has changed would set an
    argument of something else: `strategy.gradient_sync` after `strategy=single`.

    Args:
        resumed: The run.
        typed: Overrides of this start.
        folder: Folder of the YAML files.
        name: Primary config, without its suffix.

    Returns:
        The inherited overrides in order, and those that no longer apply because of another option.

    Raises:
        hydra.errors.HydraException: A group or option does not exist, though `compose_recorded` found all of the run's.
    """
    parsed = [parse_override(override) for override in typed]
    overridden = {_get_place(override) for override in parsed if not override.is_delete()}
    repeated = set(typed)  # Hydra rejects the same deletion twice
    candidates = [
        override
        for override in resumed.overrides
        if override not in repeated and _get_place(parse_override(override)) not in overridden
    ]
    before = compose_options(select_options(resumed.overrides, folder, name), folder, name)
    now = compose_options(select_options([*candidates, *typed], folder, name), folder, name)
    dropped = [override for override in candidates if not _still_applies(override, candidates, before, now)]
    return [override for override in candidates if override not in dropped], dropped


def complete(frozen: Config, before: Config, *, path: str = "") -> tuple[Config, list[str]]:
    """Return a frozen config with the settings that a later version has added, as its overrides compose them now.

    Whole sections, and arguments of the constructors that the run has; no members of a section such as `callbacks`,
    which somebody may have taken out of the file.

    Args:
        frozen: Config of the run, or a section of it.
        before: What the overrides of the run compose to with today's conf/.
        path: Key of the section with a dot at its end; empty for the root.

    Returns:
        The config, and the keys of what was added.
    """
    completed, added = dict(frozen), []
    takes_more = not path or ("_target_" in before and frozen.get("_target_") == before["_target_"])
    for key, value in before.items():
        if key not in frozen:
            if takes_more:
                completed[key] = value
                added.append(f"{path}{key}")
        elif isinstance(value, dict) and isinstance(frozen[key], dict):
            completed[key], further = complete(frozen[key], value, path=f"{path}{key}.")
            added += further
    return completed, added


def apply_changes(frozen: Config, *, before: Config, now: Config) -> Config:
    """Return the frozen config with every value that the new overrides change, directly or by interpolation.

    Defaults in conf/ that have changed since the run was frozen are the same in `before` and `now`, so they do not
    affect it.
    """
    if before.get("_target_") != now.get("_target_"):
        return now  # another option replaces the node
    changed = dict(frozen)
    for key in now:
        if key in before and before[key] == now[key]:
            continue
        if all(isinstance(config.get(key), dict) for config in (changed, before, now)):
            changed[key] = apply_changes(changed[key], before=before[key], now=now[key])
        else:
            changed[key] = now[key]
    return {key: value for key, value in changed.items() if key in now or key not in before}


def take_typed(config: Config, now: Config, typed: Sequence[str], references: Mapping[str, str]) -> Config:
    """Return the config of a resumed run with each typed setting, and those that only refer to it, as it is now.

    `apply_changes` finds none in a value that conf/ has, too, and that the frozen config, edited or of another version,
    has not.

    Args:
        config: Config of the run, changes applied.
        now: What the overrides compose to.
        typed: Overrides of this start.
        references: Settings that only refer to another one, and that one.
    """
    keys = {override.lstrip("+").partition("=")[0] for override in typed if not override.startswith("~")}
    for _ in references:  # a chain of any length
        further = {key for key, origin in references.items() if origin in keys} - keys
        if not further:
            break
        keys |= further
    for key in sorted(keys):
        config = _take(config, now, key.split("."))
    return config


def _take(config: Config, now: Config, parts: Sequence[str]) -> Config:
    name, *rest = parts
    if name not in now or isinstance(now[name], dict) != bool(rest):
        return config
    if not rest:
        return config | {name: now[name]}
    return config | {name: _take(config[name], now[name], rest)} if isinstance(config.get(name), dict) else config


def _read_overrides(folder: Path) -> list[str] | None:
    """Return the overrides that a run was started with; None without a record."""
    if not os.path.isfile(folder / ENVIRONMENT_FILE):
        return None
    typed = read_environment(folder).get("overrides")
    fix = _fix_environment(folder)
    if not isinstance(typed, list):
        raise ConfigError(str(folder / ENVIRONMENT_FILE), "its `overrides` is not a list", fix)
    if len(typed) > _MOST_OVERRIDES or sum(map(len, map(str, typed))) > _MOST_CHARACTERS:
        raise ConfigError(str(folder / ENVIRONMENT_FILE), "its `overrides` are longer than any command line", fix)
    for override in typed:
        try:
            parse_override(override)
        except (HydraException, TypeError, AttributeError, RecursionError) as error:
            shown = repr(override)[:_MOST_SHOWN]
            raise ConfigError(str(folder / ENVIRONMENT_FILE), f"{shown} is not an override", fix) from error
    recorded: list[str] = typed
    return recorded


def _outlasts_a_start(override: str) -> bool:
    key = parse_override(override).key_or_group
    return key not in ("mode", "resume", "evaluator") and not key.startswith(_SINGLE_START)


def compose_recorded(resumed: ResumedRun, folder: Path, name: str | None) -> DictConfig:
    """Compose the overrides that a run was started with.

    Args:
        resumed: The run.
        folder: Folder of the YAML files.
        name: Primary config, without its suffix.

    Raises:
        ConfigError: One of them has no meaning any more, or never had, and nobody has typed it now; or it is an option
            of a search path that is not typed.
    """
    try:
        return compose_overrides(resumed.overrides, folder, name)
    except (HydraException, OmegaConfBaseException) as reason_of_all:
        recorded = find_own_folders(resumed.search_path)
        if not set(recorded) <= set(find_own_folders(resumed.overrides)):
            exist = all(map(os.path.isdir, recorded))
            path = " ".join(map(for_shell, resumed.search_path)) if exist else f"'{SEARCH_PATH}=[<where they are now>]'"
            shown = ", ".join(map(str, recorded))
            raise ConfigError(
                f"resume={resumed.folder}",
                f"it has options of {shown}, and only the command line may choose code that runs",
                f"the same command with {path}, if you trust it",
            ) from reason_of_all
        compose_overrides([], folder, name)  # a broken file of the folder is not to be blamed on the run
        for number, override in enumerate(resumed.overrides):
            try:
                compose_overrides(resumed.overrides[: number + 1], folder, name)
            except (HydraException, OmegaConfBaseException) as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                reason = f"the run was started with {override[:_MOST_SHOWN]}, which means nothing here: {lines[0]}"
                raise ConfigError(
                    str(resumed.folder / ENVIRONMENT_FILE), reason, _fix_environment(resumed.folder)
                ) from error
        raise


def _fix_environment(folder: Path) -> str:
    return f"{shell('rm', folder / ENVIRONMENT_FILE)}, and the run resumes from its {CONFIG_FILE} alone"


def _still_applies(override: str, others: Sequence[str], before: DictConfig, now: DictConfig) -> bool:
    """Return whether an override's section still has the same target, or the deleted key still exists."""
    parsed = parse_override(override)
    parts = _get_place(parsed).split(".")
    if parsed.is_delete():
        is_added = any(other.startswith(f"+{parsed.key_or_group}{end}") for other in others for end in "=.")
        _, _, missing = find_deepest(now, parts)
        return len(parts) == 1 or is_added or not missing
    return _nearest_target(before, parts[:-1]) == _nearest_target(now, parts[:-1])


def _get_place(override: Override) -> str:
    """Return the key that an override sets; for an option with a package, `data@eval_data.mine`, the package."""
    place: str = override.package or override.key_or_group
    return place


def find_deepest(config: Any, parts: list[str]) -> tuple[Any, list[str], list[str]]:
    """Return the deepest existing section on the path to a key, and the existing and missing parts of the key."""
    node = config
    for index, part in enumerate(parts):
        if node._is_none() or part not in node:
            return node, parts[:index], parts[index:]
        child = node._get_node(part)
        if index + 1 < len(parts) and not OmegaConf.is_dict(child):
            return node, parts[:index], parts[index:]
        node = child
    return node, parts, []


def _nearest_target(config: DictConfig, parts: Sequence[str]) -> object:
    """Return the `_target_` of the deepest section on the path to a key; None if no section has one."""
    node: Any = config
    target: object = None
    for part in parts:
        node = node._get_node(part) if OmegaConf.is_dict(node) and part in node else None
        if OmegaConf.is_dict(node) and "_target_" in node:
            target = node._get_node("_target_")._value()
    return target


def list_saved_parts(config: Config, checkpoint: Path) -> Config:
    """Return the sections of a resumed run with weights from the checkpoint and the run's own tokenizer.

    An adapter checkpoint holds only the adapter: the base weights are loaded as before.
    """
    model, data = config["model"], config["data"]
    has_adapter = read_adapter(config.get("adapter")) is not None
    if model.get("pretrained") is not None and not has_adapter:
        model = model | {"pretrained": None}
    saved = find_tokenizer(checkpoint)
    eval_data = config.get("eval_data", {})
    if saved is not None:
        tokenizer = {"_target_": "recipes.tokenizer.huggingface.HuggingFace", "name": str(saved)}
        data = _with_tokenizer(data, tokenizer)
        if "sources" in data:
            data = data | {"sources": {key: _with_tokenizer(node, tokenizer) for key, node in data["sources"].items()}}
        eval_data = {key: _with_tokenizer(node, tokenizer) for key, node in eval_data.items()}
    changed: Config = {"model": model, "data": data, "eval_data": eval_data}
    if has_adapter and config["adapter"].get("pretrained") is not None:
        changed["adapter"] = config["adapter"] | {"pretrained": None}  # the checkpoint has its weights
    return changed


def _with_tokenizer(data: Any, tokenizer: Config) -> Any:
    has_one = isinstance(data, dict) and data.get("tokenizer") is not None
    return data | {"tokenizer": tokenizer} if has_one else data


def is_other_data(data: Config, trained_on: Config) -> bool:
    """Return whether a data node reads other text than that of a run, and has no split of its own."""
    if all(data.get(key) == trained_on.get(key) for key in ("_target_", "path")):
        return False
    if data.get("_target_") == trained_on.get("_target_"):
        return all(data.get(key) == trained_on.get(key) for key in ("val_fraction", "val_path"))
    return data.get("val_path") is None  # not inherited from a run on another kind of data


def find_tokenizer(checkpoint: Path | None) -> Path | None:
    """Return the tokenizer in the run folder of a checkpoint; None if there is none."""
    run = find_run_folder(checkpoint) if checkpoint is not None else None
    folder = run / TOKENIZER_FOLDER if run is not None else None
    return folder if folder is not None and folder.is_dir() else None
