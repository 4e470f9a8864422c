"""Score whether a regular expression is found in a completion."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from recipes.reward import compile_pattern


class Regex:
    """Gives 1 where a pattern is found anywhere in the completion, else 0.

    Args:
        weight: Factor in the sum of all rewards; a negative one is a penalty.
        pattern: Regular expression of Python's `re`, in which `.` matches line breaks too.
    """

    def __init__(self, *, weight: Annotated[float, ">= -1000, <= 1000"], pattern: str) -> None:
        self.weight = weight
        self._pattern = compile_pattern("pattern", pattern, instead=".")

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        references: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        """Return 1 or 0 for each completion."""
        assert self._pattern is not None, "a pattern is required"
        return [float(self._pattern.search(completion) is not None) for completion in completions]
