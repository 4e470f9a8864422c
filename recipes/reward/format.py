"""Score whether a completion consists of the expected parts, each in its tags and nothing outside of them."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any


class Format:
    """Gives 1 to `<think>…</think><answer>…</answer>` for `tags=[think,answer]`, else 0.

    Every part is there once and in order, none is empty, and there is nothing but whitespace around them.

    Args:
        weight: Factor in the sum of all rewards.
        tags: Names of the tags in their order.
    """

    def __init__(self, *, weight: Annotated[float, ">= -1000, <= 1000"], tags: Annotated[list[str], ">= 1"]) -> None:
        if not tags:
            raise ValueError("tags is []; a format has one part or more; set ['answer']")
        self.weight = weight
        self._tags = [text for tag in tags for text in (f"<{tag}>", f"</{tag}>")]
        self._split = re.compile("|".join(map(re.escape, dict.fromkeys(self._tags))))

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        references: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        """Return 1 or 0 for each completion."""
        return [float(self._fits(completion)) for completion in completions]

    def _fits(self, completion: str) -> bool:
        if self._split.findall(completion) != self._tags:
            return False
        texts = self._split.split(completion)  # outside, inside, outside, …
        return all(bool(text.strip()) == bool(index % 2) for index, text in enumerate(texts))
