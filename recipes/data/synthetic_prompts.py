"""Synthetic prompts for first runs of reinforcement learning: words to reverse or sort, with the right answer."""

from typing import Annotated, Any

from typing_extensions import override

from recipes.data.prompts import Prompts
from recipes.data.read_rows import Rows
from recipes.data.synthetic_tasks import TaskRows


class SyntheticPrompts(Prompts):
    """Prompts such as `rev:abcd>` with the reference `dcba`, those of `SyntheticTasks`."""

    def __init__(self, *, num_examples: Annotated[int, ">= 100"], **settings: Any) -> None:
        """Store the settings.

        Args:
            num_examples: Number of prompts, training and validation together.
            **settings: As for `Prompts`.
        """
        super().__init__(fields={}, path="", val_path=None, split="train", **settings)
        self._rows_of_tasks = TaskRows(["rev", "sort"], num_examples)

    @override
    def _open(self, name: str, path: str) -> Rows:
        return self._rows_of_tasks
