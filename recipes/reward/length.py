"""Score the length of a completion: full up to a target, and less beyond it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal


class Length:
    """Gives 1 up to `target` units, 0 from `limit` units on, and falls in a straight line between them.

    The soft penalty of overlong answers of DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.4), from 1 to 0 instead of
    0 to -1.

    Args:
        weight: Factor in the sum of all rewards.
        target: Largest length with the full score.
        limit: Smallest length with the score 0, more than `target`.
        unit: `words`, separated by whitespace, or `characters`.
    """

    def __init__(
        self,
        *,
        weight: Annotated[float, ">= -1000, <= 1000"],
        target: Annotated[int, ">= 0"],
        limit: Annotated[int, ">= 1"],
        unit: Literal["words", "characters"],
    ) -> None:
        if limit <= target:
            raise ValueError(f"limit is {limit}; it is not more than the target {target}; set {target + 1}")
        self.weight = weight
        self._target, self._limit, self._unit = target, limit, unit

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        references: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        """Return a score from 0 to 1 for each completion."""
        return [self._score(completion) for completion in completions]

    def _score(self, completion: str) -> float:
        length = len(completion.split()) if self._unit == "words" else len(completion)
        return min(1.0, max(0.0, (self._limit - length) / (self._limit - self._target)))
