"""Turn the command line into one checked, typed, frozen run. Imports neither torch nor Lightning."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recipes.config.check import check_config
from recipes.config.check.command_line import compose_typed
from recipes.config.check.origin import check_origin
from recipes.config.check.sections import find_missing_groups, is_of_file
from recipes.config.compose import CONF
from recipes.config.resolved import UNREAD_BY_LOADING, Awaited, ResolvedRun, resolve
from recipes.config.trust import find_origin, recall_typed
from recipes.errors import ConfigError


def compose_and_check(
    overrides: Sequence[str],
    *,
    config_folder: Path = CONF,
    config_name: str = "config",
    continues: bool = False,
    only_weights: bool = False,
    awaited: Awaited | None = None,
) -> tuple[ResolvedRun | None, list[ConfigError]]:
    """Compose a run and collect all of its errors; builds nothing and creates no folder.

    Args:
        overrides: Overrides typed on this command line.
        config_folder: Config folder.
        config_name: Primary config, without its suffix.
        continues: Whether the run folder holds an earlier start of this same run, as in a resumed sweep.
        only_weights: Whether nothing but the weights of a checkpoint is loaded: what that does not read, such as the
            data, may be missing, and a folder may name any class there.
        awaited: The run that this one is to start from, if that has not run yet: then `overrides` name none.

    Returns:
        The run, None if it cannot be composed; and the errors.
    """
    run = None
    composed, mistakes = compose_typed(overrides, config_folder=config_folder, config_name=config_name)
    if composed is not None:
        if missing := find_missing_groups(composed.config):
            return None, [*mistakes, _explain_part(config_folder, config_name, missing)]
        run = resolve(replace(composed, continues=continues))
        if awaited is not None:
            starts = {"start_from": awaited.name} if run.mode.trains else {}
            run = replace(run.with_settings(starts), awaited=awaited)
        built = run.only_weights() if only_weights else run
        origin = find_origin(config_folder, overrides)
        known = [*recall_typed(overrides), *overrides]
        if origin is not None and (untrusted := [*check_origin(built.config, known, origin)]):
            return None, [*mistakes, *untrusted]  # the checks below look for the constructors
        rejected = {f"no {mistake.setting.partition('=')[0]}" for mistake in mistakes}
        rejected |= {mistake.setting for mistake in mistakes}
        found = check_config(run, overrides)
        # a setting may be missing only because its override was rejected, or because the file of its option is wrong
        files = tuple(f"{mistake.setting.partition('=')[0]}." for mistake in found if is_of_file(mistake))
        mistakes = [mistake for mistake in mistakes if not mistake.setting.startswith(files)]
        # and an option may be chosen only because that override was
        chosen = tuple(f"{key}=" for mistake in mistakes for key in _list_keys(mistake))
        found = [mistake for mistake in found if not mistake.setting.startswith(chosen)]
        mistakes = [*mistakes, *(mistake for mistake in found if mistake.setting not in rejected)]
        if only_weights:
            mistakes = [mistake for mistake in mistakes if _get_section(mistake) not in UNREAD_BY_LOADING]
        run = built
    return run, mistakes


def _list_keys(mistake: ConfigError) -> list[str]:
    """Return the keys of what was typed, and of what is to be typed instead."""
    words = [*mistake.setting.split(), *mistake.fix.split()]
    return [word.lstrip("+").partition("=")[0] for word in words if "=" in word]


def _get_section(mistake: ConfigError) -> str:
    """Return the section of the setting that a mistake is about."""
    return mistake.setting.removeprefix("no ").partition("=")[0].partition(".")[0]


def _explain_part(folder: Path, name: str, missing: Sequence[str]) -> ConfigError:
    """Return the error for a primary config that holds some settings of a run, not all of them."""
    return ConfigError(
        f"--config-path {folder} --config-name {name}",
        f"it is not the whole config of a run: it has no {', '.join(missing)}",
        f"'hydra.searchpath=[{folder}]' recipe={name}, with the file as {folder}/recipe/{name}.yaml and"
        " `# @package _global_` as its first line",
    )
