"""Every mistake that names, types and arithmetic can show, before anything is built. Milliseconds; no torch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.config.check.batch_size import check_batches, count_ranks
from recipes.config.check.compatibility import check_kinds, check_pairs
from recipes.config.check.loss_spike import check_spikes
from recipes.config.check.lr_scaling import check_lr_scaling
from recipes.config.check.nodes import check_nodes
from recipes.config.check.paths import check_run
from recipes.config.check.ranges import check_ranges
from recipes.config.check.sections import CONF, check_words
from recipes.config.check.strategy import check_engines
from recipes.errors import Mistake


def check(
    config: Mapping[str, Any],
    choices: Mapping[str, str],
    overrides: Sequence[str],
    run_folder: Path,
) -> list[Mistake]:
    """Read a whole config and report every mistake in it.

    Args:
        config: Plain values, every interpolation resolved.
        choices: The option typed or defaulted for each group, to name it in messages.
        overrides: What was typed.
        run_folder: Where the run would leave its files.

    Returns:
        The mistakes, in the order of the checks; empty if the run may be built.
    """
    mistakes = told_where([*check_words(config), *check_nodes(config)], overrides)
    if mismatches := [*check_kinds(config, choices, overrides)]:
        # data of the wrong kind cannot be filled in: what is missing there is no mistake of its own
        rest = [m for m in mistakes if not m.you_set.startswith(("data.", "tokenizer."))]
        return [*rest, *mismatches]
    scaling = [*check_lr_scaling(config, choices, overrides)]
    if scaling:  # without a reference point there is no learning rate: no mistake of its own
        mistakes = [m for m in mistakes if not m.you_set.startswith("optimizer.lr=")]
    if mistakes:
        # what follows computes with these values: it would only repeat the same mistakes in other words
        told = {mistake.you_set for mistake in mistakes}
        ranges = (m for m in check_ranges(config) if m.you_set not in told)
        return [*mistakes, *scaling, *ranges]
    world_size, wrong_devices = count_ranks(config)
    return [
        *scaling,
        *check_ranges(config),
        *wrong_devices,
        *check_batches(config, world_size),
        *check_pairs(config),
        *check_engines(config, world_size),
        *check_spikes(config, world_size or 1),
        *check_run(config, overrides, run_folder),
    ]


def told_where(mistakes: Sequence[Mistake], overrides: Sequence[str]) -> list[Mistake]:
    """The mistakes without those that only follow from a typed one; the rest with the file to mend.

    Args:
        mistakes: Each about a key, `key=value`.
        overrides: What was typed.
    """
    typed = {override.lstrip("+~").partition("=")[0] for override in overrides}
    values = {m.you_set.partition("=")[2] for m in mistakes if _key(m) in typed}
    told: list[Mistake] = []
    for mistake in mistakes:
        if _key(mistake) in typed:
            told.append(mistake)
            continue
        if mistake.you_set.partition("=")[2] in values:
            continue  # the same value, by interpolation
        line = _line_of(_key(mistake))
        remedy = mistake.remedy if line is None else f"{mistake.remedy} ({line})"
        told.append(Mistake(mistake.you_set, mistake.why, remedy))
    return told


def _key(mistake: Mistake) -> str:
    return mistake.you_set.removeprefix("no ").partition("=")[0]


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
