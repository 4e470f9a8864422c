"""Every mistake that names, types and arithmetic can show, before anything is built. Milliseconds; no torch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.config.check.batch_size import check_batch_size, count_ranks
from recipes.config.check.compatibility import check_compatibility, check_kinds
from recipes.config.check.loss_spike import check_loss_spike
from recipes.config.check.lr_scaling import check_lr_scaling
from recipes.config.check.nodes import check_nodes
from recipes.config.check.paths import check_paths
from recipes.config.check.ranges import check_ranges
from recipes.config.check.sections import CONF, check_sections
from recipes.config.check.strategy import check_strategy
from recipes.errors import ConfigError


def check_config(
    config: Mapping[str, Any],
    choices: Mapping[str, str],
    overrides: Sequence[str],
    run_folder: Path,
) -> list[ConfigError]:
    """Read a whole config and report every mistake in it.

    Args:
        config: Plain values, every interpolation resolved.
        choices: The option typed or defaulted for each group, to name it in messages.
        overrides: What was typed.
        run_folder: Where the run would leave its files.

    Returns:
        The mistakes, in the order of the checks; empty if the run may be built.
    """
    mistakes = locate_mistakes([*check_sections(config), *check_nodes(config)], overrides)
    if mismatches := [*check_kinds(config, choices, overrides)]:
        # data of the wrong kind cannot be filled in: what is missing there is no mistake of its own
        rest = [m for m in mistakes if not m.setting.startswith(("data.", "tokenizer."))]
        return [*rest, *mismatches]
    scaling = [*check_lr_scaling(config, choices, overrides)]
    if scaling:  # without a reference point there is no learning rate: no mistake of its own
        mistakes = [m for m in mistakes if not m.setting.startswith("optimizer.lr=")]
    if mistakes:
        # what follows computes with these values: it would only repeat the same mistakes in other words
        told = {mistake.setting for mistake in mistakes}
        ranges = (m for m in check_ranges(config) if m.setting not in told)
        return [*mistakes, *scaling, *ranges]
    world_size, wrong_devices = count_ranks(config)
    return [
        *scaling,
        *check_ranges(config),
        *wrong_devices,
        *check_batch_size(config, world_size),
        *check_compatibility(config),
        *check_strategy(config, world_size),
        *check_loss_spike(config, world_size or 1),
        *check_paths(config, overrides, run_folder),
    ]


def locate_mistakes(mistakes: Sequence[ConfigError], overrides: Sequence[str]) -> list[ConfigError]:
    """The mistakes without those that only follow from a typed one; the rest with the file to mend.

    Args:
        mistakes: Each about a key, `key=value`.
        overrides: What was typed.
    """
    typed = {override.lstrip("+~").partition("=")[0] for override in overrides}
    values = {m.setting.partition("=")[2] for m in mistakes if _key(m) in typed}
    told: list[ConfigError] = []
    for mistake in mistakes:
        if _key(mistake) in typed:
            told.append(mistake)
            continue
        if mistake.setting.partition("=")[2] in values:
            continue  # the same value, by interpolation
        line = _line_of(_key(mistake))
        fix = mistake.fix if line is None else f"{mistake.fix} ({line})"
        told.append(ConfigError(mistake.setting, mistake.reason, fix))
    return told


def _key(mistake: ConfigError) -> str:
    return mistake.setting.removeprefix("no ").partition("=")[0]


def _line_of(key: str) -> str | None:
    """`in conf/model/mine.yaml, line 4`, where exactly one line under conf/ sets the last part of a key."""
    wanted = re.compile(rf"\s*{re.escape(key.rpartition('.')[2])}\s*:")
    found = [
        f"in {path.relative_to(CONF.parent)}, line {number}"
        for path in sorted(Path(CONF).rglob("*.yaml"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if wanted.match(line)
    ]
    return found[0] if len(found) == 1 else None
