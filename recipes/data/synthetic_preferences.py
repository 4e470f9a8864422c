"""Synthetic pairs of answers for first runs on preferences: a right and a wrong one, or one as good in capitals."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from typing_extensions import override

from recipes.data.preferences import Preferences
from recipes.data.read_rows import Row, Rows
from recipes.data.synthetic_tasks import TaskRows

Prefer = Literal["right", "small_letters"]


class SyntheticPreferences(Preferences):
    """Pairs such as `rev:abcd>` with the answers `dcba` and `dbca`, or `DCBA`, of the prompts of `SyntheticTasks`."""

    target_kind: ClassVar[str] = "pairs"

    def __init__(
        self, *, num_examples: Annotated[int, ">= 100"], prefer: Prefer, packing: bool, **settings: Any
    ) -> None:
        """Store the settings.

        Args:
            num_examples: Number of pairs, training and validation together.
            prefer: `right`: a right answer to one with two letters swapped. `small_letters`: an answer in small letters
                to the same one in capitals; `sort` is in either order, by chance, as in `data.mixed_answers`.
            packing: As for `Preferences`.
            **settings: As for `Conversations`.
        """
        super().__init__(kind="pairs", fields={}, packing=packing, path="", val_path=None, split="train", **settings)
        self._rows_of_pairs = _PairRows(num_examples, prefer)

    @override
    def _open(self, name: str, path: str) -> Rows:
        return self._rows_of_pairs


class _PairRows:
    def __init__(self, num_examples: int, prefer: Prefer) -> None:
        self.name = f"{num_examples:,} pairs of answers to tasks"
        self._prefer = prefer
        self._answered = TaskRows(["rev", "sort"], num_examples, is_mixed=prefer == "small_letters")

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self)

    def content_hash(self, cache_dir: Path) -> str:
        return f"{self.name} {self._prefer}"

    def __iter__(self) -> Iterator[Row]:
        rng = random.Random(0)
        for row in self._answered:
            assert isinstance(row.content, dict), "rows of tasks have fields"
            prompt, answer = row.content["prompt"], str(row.content["completion"])
            if self._prefer == "small_letters":
                yield Row(row.place, {"prompt": prompt, "chosen": answer.lower(), "rejected": answer.upper()})
                continue
            # the places of two unequal letters; words of one letter alone have none
            places = [at for at in range(len(answer) - 1) if answer[at] != answer[at + 1]]
            if places:
                at = rng.choice(places)
                wrong = f"{answer[:at]}{answer[at + 1]}{answer[at]}{answer[at + 2 :]}"
                yield Row(row.place, {"prompt": prompt, "chosen": answer, "rejected": wrong})
