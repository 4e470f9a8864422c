"""Every mistake that names, types and arithmetic can show, before anything is built. Milliseconds; no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.check.batches import check_batches
from recipes.check.devices import count_ranks
from recipes.check.engines import check_engines
from recipes.check.kinds import check_kinds
from recipes.check.lr_scaling import check_lr_scaling
from recipes.check.nodes import check_nodes
from recipes.check.origin import told_where
from recipes.check.pairs import check_pairs
from recipes.check.ranges import check_ranges
from recipes.check.run import check_run
from recipes.check.spikes import check_spikes
from recipes.check.words import check_words
from recipes.mistake import Mistake


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
