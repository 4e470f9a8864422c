"""Synthetic pairs of answers for first runs on preferences: a right one, and one with two letters swapped."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from typing_extensions import override

from recipes.data.preferences import Preferences
from recipes.data.read_rows import Row, Rows
from recipes.data.synthetic_tasks import TaskRows


class SyntheticPreferences(Preferences):
    """Pairs such as `rev:abcd>` with the answers `dcba` and `dbca`, of the prompts of `SyntheticTasks`."""

    target_kind: ClassVar[str] = "pairs"

    def __init__(self, *, num_examples: Annotated[int, ">= 100"], packing: bool, **settings: Any) -> None:
        """Store the settings.

        Args:
            num_examples: Number of pairs, training and validation together.
            packing: As for `Preferences`.
            **settings: As for `Conversations`.
        """
        super().__init__(kind="pairs", fields={}, packing=packing, path="", val_path=None, split="train", **settings)
        self._rows_of_pairs = _PairRows(num_examples)

    @override
    def _open(self, name: str, path: str) -> Rows:
        return self._rows_of_pairs


class _PairRows:
    def __init__(self, num_examples: int) -> None:
        self.name = f"{num_examples:,} pairs of answers to tasks"
        self._answered = TaskRows(["rev", "sort"], num_examples, shuffle_answers=False)

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self)

    def content_hash(self, cache_dir: Path) -> str:
        return self.name

    def __iter__(self) -> Iterator[Row]:
        rng = random.Random(0)
        for row in self._answered:
            assert isinstance(row.content, dict), "rows of tasks have fields"
            right = str(row.content["completion"])
            # the places of two unequal letters; words of one letter alone have none
            places = [at for at in range(len(right) - 1) if right[at] != right[at + 1]]
            if places:
                at = rng.choice(places)
                wrong = f"{right[:at]}{right[at + 1]}{right[at]}{right[at + 2 :]}"
                yield Row(row.place, {"prompt": row.content["prompt"], "chosen": right, "rejected": wrong})
