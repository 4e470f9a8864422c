"""Turn the command line into one checked, frozen config. Imports neither torch nor Lightning."""

from collections.abc import Sequence
from pathlib import Path

from recipes.config.check import check_config
from recipes.config.check.command_line import compose_overrides
from recipes.config.compose import CONF, Composed
from recipes.errors import ConfigError


def compose_and_check(
    overrides: Sequence[str], *, config_folder: Path = CONF, config_name: str = "config"
) -> tuple[Composed | None, list[ConfigError]]:
    """Compose a run and collect every mistake in it; builds nothing and creates no folder.

    Returns:
        The run, None if it cannot be composed; and the mistakes.
    """
    composed, mistakes = compose_overrides(overrides, config_folder=config_folder, config_name=config_name)
    if composed is not None:
        rejected = {f"no {mistake.setting.partition('=')[0]}" for mistake in mistakes}
        found = check_config(composed.config, composed.choices, overrides, composed.run_folder)
        # without a rejected override, its setting may be missing: a consequence
        mistakes = [*mistakes, *(mistake for mistake in found if mistake.setting not in rejected)]
    return composed, mistakes
