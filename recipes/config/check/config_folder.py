"""Check the Hydra settings of a `--config-path` folder before Hydra uses them: plugins, callbacks, logging, folders."""

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.config.cached_compose import compose_overrides
from recipes.config.check.composition_errors import find_mark
from recipes.config.compose import CONF, register_resolvers
from recipes.config.overrides import for_shell, to_grammar
from recipes.config.trust import SEARCH_PATH, find_trusted_folders, parse_values, restrict_variables
from recipes.errors import ConfigError

_MISSING = object()
# what Hydra itself fills in, and the text of --help
_FREE = ("runtime", "overrides", "help", "job.name", "job.config_name", "job.override_dirname")


def check_config_folder(folder: Path, name: str, typed: Sequence[str]) -> list[ConfigError]:
    """Reject settings of Hydra that the primary config of an untrusted folder changes and the command line does not.

    Hydra imports and calls what its section names (`hydra.callbacks`, `hydra.job_logging`, the sweeper) before a run is
    composed; the run's folder, too, is one of its settings.

    Args:
        folder: Folder given by `--config-path`.
        name: Primary config, without its suffix.
        typed: Overrides of this command line.
    """
    if missing := [*_check_search_path(typed)]:
        return missing
    if folder.resolve() in find_trusted_folders(typed):
        return []
    search_path = _read_search_path(folder / f"{name}.yaml")
    trusted = [str(folder.resolve()), *(search_path or [])]
    trust = f"{for_shell(f'{SEARCH_PATH}={to_grammar(trusted)}')} if you trust all of it"
    is_replaced = any(override.key_or_group == SEARCH_PATH for override in parse_values(typed))
    if search_path is not None and not is_replaced:
        return [ConfigError(f"{SEARCH_PATH}=…", f"{folder} sets it, which only conf/ and the command line may", trust)]
    overrides = [str(override.input_line) for override in parse_values(typed)]
    of_hydra = [text for text in overrides if text.lstrip("+").startswith("hydra")]
    register_resolvers(restrict_variables(typed))  # composing resolves the defaults list, and an error would show it
    try:
        node = compose_overrides(overrides, folder, name)
        own = compose_overrides(of_hydra, CONF, "config")
        bare = compose_overrides(of_hydra, CONF, None)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError) as error:
        if mark := find_mark(error):
            return [mark]
        first_line = str(error).strip().partition("\n")[0]
        reason = f"it cannot be composed: {first_line}"
        if "Could not load 'config'" in first_line and folder.resolve() != CONF.resolve():
            reason = f"its defaults list has /config, which is that of {CONF}, and Hydra looks in {folder} alone"
            fix = for_shell(f"{SEARCH_PATH}=[file://{CONF.resolve()}]")
            return [ConfigError(f"--config-path {folder}", reason, fix)]
        return [ConfigError(f"--config-path {folder}", reason, "a corrected version of it")]
    known = [dict(_flatten(_get_hydra(config))) for config in (own, bare)]
    return [
        ConfigError(
            f"hydra.{key}={to_grammar(value)}",
            f"{folder} sets it, which only conf/ and the command line may: it says what Hydra executes and where"
            " a run is written",
            f"it on this command line, or {trust}",
        )
        for key, value in _flatten(_get_hydra(node))
        if not key.startswith(_FREE) and all(value != (leaves[key] if key in leaves else _MISSING) for leaves in known)
    ]


def _check_search_path(typed: Sequence[str]) -> Iterator[ConfigError]:
    """Check that the folders and packages of `hydra.searchpath` exist; Hydra goes on without those that do not."""
    for override in parse_values(typed):
        if override.key_or_group != SEARCH_PATH:
            continue
        places, setting = override.value(), str(override.input_line)
        if not isinstance(places, list):
            yield ConfigError(setting, "it takes a list of folders", f"'{SEARCH_PATH}=[{to_grammar(places)}]'")
            continue
        for place in map(str, places):
            name = place.removeprefix("pkg://").partition("/")[0].partition(".")[0]
            is_package = place.startswith("pkg://")
            exists = find_spec(name) is not None if is_package else os.path.isdir(place.removeprefix("file://"))
            if not exists:
                what = f"no package {name!r} is installed" if is_package else f"there is no folder {place}"
                yield ConfigError(setting, what, f"'{SEARCH_PATH}=[file://<a folder like conf/>]'")


def _read_search_path(file: Path) -> list[str] | None:
    """Return the search path that a primary config sets, from which its composition would import; None without one."""
    try:
        config: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None  # reported by whoever composes it
    hydra = config["hydra"] if isinstance(config, dict) and "hydra" in config else None
    if not isinstance(hydra, dict) or "searchpath" not in hydra:
        return None
    path = hydra["searchpath"]
    return [str(entry) for entry in path] if isinstance(path, list) else []


def _get_hydra(config: Any) -> dict[str, Any]:
    section: Any = OmegaConf.to_container(config.hydra, resolve=False)
    return dict(section)


def _flatten(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value of a section with its key."""
    for key, value in section.items():
        full = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value:
            yield from _flatten(value, full)
        else:
            yield full, value
