"""Check a config by names, types and arithmetic before anything is built; takes milliseconds, without torch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.config.check.activation_checkpoint import check_activation_checkpoint
from recipes.config.check.batch_size import check_batch_size, count_ranks
from recipes.config.check.compatibility import check_compatibility, check_evaluator, check_kinds
from recipes.config.check.dashboard import PLACES, check_dashboards
from recipes.config.check.data import check_data
from recipes.config.check.devices import check_devices
from recipes.config.check.loss_spike import check_loss_spike
from recipes.config.check.lr_scaling import check_lr_scaling
from recipes.config.check.mesh import check_mesh
from recipes.config.check.metrics import check_metrics, check_readers
from recipes.config.check.moe import check_moe
from recipes.config.check.nodes import check_nodes
from recipes.config.check.paths import check_paths
from recipes.config.check.ranges import check_ranges
from recipes.config.check.renamed import check_renamed, drop_consequences
from recipes.config.check.resumed import check_resumed
from recipes.config.check.sections import check_settings, check_structure
from recipes.config.check.strategy import check_optimizer, check_strategy
from recipes.config.search_path import find_config_folders
from recipes.config.trust import CONF
from recipes.errors import ConfigError


def check_config(
    config: Mapping[str, Any],
    choices: Mapping[str, str],
    overrides: Sequence[str],
    run_folder: Path,
    *,
    continues: bool = False,
) -> list[ConfigError]:
    """Return all errors in a composed config.

    Args:
        config: Plain values, every interpolation resolved.
        choices: Option chosen for each group, to name it in messages.
        overrides: Command-line overrides.
        run_folder: Folder for the files of the run.
        continues: Whether the folder holds an earlier start of this same run.

    Returns:
        The errors in the order of the checks; empty if the run can be built.
    """
    renamed = [*check_renamed(config)]
    structure = [*check_structure(config)]
    found = [*structure, *check_settings(config), *check_nodes(config)]
    if not structure:  # the others read its sections
        found += [*check_data(config), *check_metrics(config)]
    dashboards = [*check_dashboards(config)]
    if dashboards:  # whose sections the others refer to
        found = [mistake for mistake in found if _get_key(mistake) not in PLACES]
    mistakes = drop_consequences(found, renamed)
    mistakes = [*locate_mistakes([*renamed, *mistakes], overrides), *dashboards]
    if structure:
        return mistakes  # the checks below read these sections
    if mismatches := [*check_kinds(config, choices, overrides)]:
        # data of the wrong kind has no tokenizer or sequence length, metrics no classes: consequences, not mistakes
        consequences = ("data.", "tokenizer.", "metrics.", "no metrics.")
        rest = [m for m in mistakes if not m.setting.startswith(consequences)]
        return [*rest, *mismatches]
    scaling = [*check_lr_scaling(config, choices, overrides)]
    if scaling:  # without a reference point there is no learning rate: a consequence as well
        mistakes = [m for m in mistakes if not m.setting.startswith("optimizer.lr=")]
    if mistakes:
        # the checks below compute with these values and would only report the same mistakes again
        reported = {mistake.setting for mistake in mistakes}
        ranges = (m for m in check_ranges(config) if m.setting not in reported)
        return [*mistakes, *scaling, *ranges]
    world_size, wrong_devices = count_ranks(config)
    return [
        *scaling,
        *check_ranges(config),
        *wrong_devices,
        *check_batch_size(config, world_size),
        *check_mesh(config, world_size),
        *check_moe(config, world_size),
        *check_compatibility(config),
        *check_strategy(config, world_size),
        *check_activation_checkpoint(config),
        *check_devices(config),
        *check_optimizer(config, choices),
        *check_loss_spike(config, world_size or 1),
        *check_readers(config),
        *check_evaluator(config),
        *check_resumed(config, run_folder),
        *check_paths(config, overrides, run_folder, continues=continues),
    ]


def locate_mistakes(mistakes: Sequence[ConfigError], overrides: Sequence[str]) -> list[ConfigError]:
    """Drop errors caused by a wrong override, and add the file and line to correct to the others.

    Args:
        mistakes: Errors about a key, `key=value`.
        overrides: Command-line overrides.
    """
    typed_keys = {override.lstrip("+~").partition("=")[0] for override in overrides}
    typed_values = {m.setting.partition("=")[2] for m in mistakes if _get_key(m) in typed_keys}
    if any(mistake.setting.startswith("no ") for mistake in mistakes):
        typed_values.add("null")  # what refers to a missing setting
    located: list[ConfigError] = []
    for mistake in mistakes:
        if _get_key(mistake) in typed_keys:
            located.append(mistake)
            continue
        if mistake.setting.partition("=")[2] in typed_values:
            continue  # the same value, by interpolation
        place = _find_place(_get_key(mistake), overrides)
        fix = mistake.fix if place is None else f"{mistake.fix} ({place})"
        located.append(ConfigError(mistake.setting, mistake.reason, fix))
    return located


def _get_key(mistake: ConfigError) -> str:
    return mistake.setting.removeprefix("no ").partition("=")[0]


def _find_place(key: str, typed: Sequence[str]) -> str | None:
    """Return `in conf/model/mine.yaml, line 4`, if exactly one line of all options sets the last part of the key."""
    pattern = re.compile(rf"\s*{re.escape(key.rpartition('.')[2])}\s*:")
    places = [
        f"in {path.relative_to(CONF.parent) if folder == CONF else path}, line {number}"
        for folder in find_config_folders(typed)
        for path in sorted(folder.rglob("*.yaml"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.match(line)
    ]
    return places[0] if len(places) == 1 else None
