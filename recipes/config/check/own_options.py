"""Check the options of one's own folders: Hydra ignores, or puts elsewhere, what is not as it expects it."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.config.check.sections import COMPOSING, NODES, SETTINGS, WITHOUT_TARGET, list_groups, suggest_value
from recipes.config.check.suggestions import find_typed_choice, list_chosen, suggest_addition
from recipes.config.instantiate import TARGET
from recipes.config.resolved import ResolvedRun
from recipes.config.search_path import find_config_folders
from recipes.config.trust import CONF
from recipes.errors import ConfigError, shell


def check_own_options(run: ResolvedRun, overrides: Sequence[str]) -> Iterator[ConfigError]:
    """Check the files of one's own folders that are chosen: that each is read, and sets what its group is for.

    Args:
        run: The run.
        overrides: Overrides typed on this command line.
    """
    yield from _check_names(run, overrides)
    yield from _check_packages(run.config, run.choices, overrides)


def _check_names(run: ResolvedRun, overrides: Sequence[str]) -> Iterator[ConfigError]:
    """Reject an own option that has the name of one in conf/, which is the one that Hydra reads."""
    if Path(run.config_folder).resolve() != CONF.resolve():
        return  # its options come first, and conf/ may be one of the folders
    for folder in find_config_folders(overrides)[1:]:
        for group in (*list_groups(), *COMPOSING[:2]):
            for option in list_chosen(group, run.choices, run.overrides):
                own, built_in = (place / group / f"{option}.yaml" for place in (folder, CONF))
                if not own.is_file() or not built_in.is_file() or own.read_bytes() == built_in.read_bytes():
                    continue
                chosen = find_typed_choice(group, run.overrides) or run.choices[group]
                choice = suggest_addition(group, "<new name>", chosen, overrides)
                yield ConfigError(
                    f"{group}={chosen}",
                    f"conf/ has an option {option!r} too, which is read instead of {own}",
                    f"{shell('mv', own)} {shlex.quote(str(own.parent))}/<new name>.yaml, and then {choice}",
                )


def _check_packages(
    config: Mapping[str, Any], choices: Mapping[str, str], overrides: Sequence[str]
) -> Iterator[ConfigError]:
    """Check that the option of a group sets what that group is for, and that the file says where in the config."""
    for group, option in choices.items():
        name = f"{option}.yaml"
        folders = [path for path in find_config_folders(overrides) if (path / group / name).is_file()]
        if not folders or (folders[0] == CONF and group not in COMPOSING[:2]):
            continue
        file, section = folders[0] / group / name, config.get(group)
        text, keys = (
            file.read_text(encoding="utf-8-sig", errors="replace"),
            section if isinstance(section, Mapping) else {},
        )
        if group not in (*list_groups(), *COMPOSING) and "/" not in group and group in config:
            typed = next((text for text in overrides if text.lstrip("+") == f"{group}={option}"), None)
            fix = (
                f"the same command without {typed}" if typed else f"no entry {group}: {option} in the file that has it"
            )
            reason = f"nothing reads a section {group!r}, which is where {file} puts its settings"
            yield ConfigError(typed or f"{group}={option}", reason, fix)
            continue
        of_config = {*SETTINGS, *list_groups(), *NODES, "hydra"} if group == "sweep" else {group}
        if group in COMPOSING[:2] and group in config:
            is_misplaced = True
        else:
            is_misplaced = "# @package" not in text and not of_config.isdisjoint(keys) and group not in COMPOSING
        if is_misplaced:
            reason = f"its settings stand below {group}: no comment places them in the config"
            yield ConfigError(
                f"{group}={option}",
                f"{file}: {reason if text.strip() else 'it is empty'}",
                f"# @package _global_ as the first line of {file}",
            )
        elif group == "sweep" and TARGET not in keys:
            reason = f"{file}: it lacks the settings that every sweep has, which are those of `none`"
            yield ConfigError(f"sweep={option}", reason, f"defaults: [none] at the top of {file}")
        elif keys and TARGET not in keys and group not in (*WITHOUT_TARGET, *COMPOSING):
            base = suggest_value(group).partition("=")[2].strip("<>").partition(" | ")[0]
            reason = f"{file}: it names nothing to build, and extends no option that does"
            fix = f"defaults: [<an option of {group}, such as {base}>] at the top of {file}"
            yield ConfigError(f"{group}={option}", reason, fix)
