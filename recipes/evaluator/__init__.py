"""Evaluators for `mode=evaluate` other than a split of the data."""

from typing import Any, Protocol

from recipes.task.language_modeling import LanguageModeling
from recipes.tokenizer import Tokenizer


class Evaluator(Protocol):
    """Interface of the options in conf/evaluator.

    Attributes:
        name: Name in its result file in the run folder, `evaluate_<name>.json`.
    """

    name: str

    def prepare(self) -> None:
        """Check settings and load tasks, before any weights are loaded.

        Raises:
            ConfigError: A setting is wrong, or something cannot be read.
        """

    def evaluate(self, task: LanguageModeling, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return a JSON record; its `tasks` maps each task to its `metrics`: name -> `value`, `stderr`."""
