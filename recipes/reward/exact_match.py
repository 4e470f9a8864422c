"""Score whether an answer is the expected one, character for character."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from recipes.reward import compile_pattern, find_part


class ExactMatch:
    """Gives 1 where the completion equals the reference, else 0; whitespace at both ends does not count.

    Args:
        weight: Factor in the sum of all rewards.
        answer_regex: Regular expression for the part to compare, in both texts: the first group of its last match. A
            completion without a match is wrong, and a reference without one is compared whole. None compares all.
        ignore_case: Whether upper and lower case are the same.
    """

    def __init__(
        self, *, weight: Annotated[float, ">= -1000, <= 1000"], answer_regex: str | None, ignore_case: bool
    ) -> None:
        self.weight = weight
        self._pattern = compile_pattern("answer_regex", answer_regex)
        self._ignore_case = ignore_case

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        references: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        """Return 1 or 0 for each completion."""
        return [float(self._are_equal(*pair)) for pair in zip(completions, references, strict=True)]

    def _are_equal(self, completion: str, reference: str) -> bool:
        given = find_part(self._pattern, completion)
        expected = find_part(self._pattern, reference)
        if given is None:
            return False
        return self._normalize(given) == self._normalize(reference if expected is None else expected)

    def _normalize(self, text: str) -> str:
        return text.strip().casefold() if self._ignore_case else text.strip()
