"""Score whether an answer is the expected number, however it is written."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from recipes.reward import compile_pattern, find_part

LOGGER = logging.getLogger("lightning_recipes")

# 1,234.50  -3  .5  2e-3  3/4  12 %; a comma is part of a number between groups of three digits alone
_MINUS = "\u2212"  # as it is typeset
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = rf"[-+{_MINUS}]?(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_FOUND = re.compile(rf"(?<![\w.])({_NUMBER})(?:\s*/\s*({_NUMBER}))?\s*(%?)")
_MOST_CHARACTERS = 400  # of one number: a longer one is none that anybody wrote


class Numeric:
    """Gives 1 where the last number of the completion equals that of the reference, else 0.

    Args:
        weight: Factor in the sum of all rewards.
        answer_regex: Regular expression for the part to read the number in, in both texts: the first group of its last
            match. A completion without a match is wrong, and of a reference without one all is read. None reads all.
        relative_tolerance: Largest difference, as a fraction of the larger number, at which two numbers are equal.
    """

    def __init__(
        self,
        *,
        weight: Annotated[float, ">= -1000, <= 1000"],
        answer_regex: str | None,
        relative_tolerance: Annotated[float, ">= 0, <= 0.5"],
    ) -> None:
        self.weight = weight
        self._pattern = compile_pattern("answer_regex", answer_regex)
        self._relative_tolerance = relative_tolerance
        self._has_warned = False

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        references: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        """Return 1 or 0 for each completion."""
        expected = [self._read_reference(reference) for reference in references]
        if references and not self._has_warned and all(number is None for number in expected):
            self._has_warned = True
            LOGGER.warning("reward=numeric: no expected answer holds a number, so that every score is 0")
        return [self._judge(*pair) for pair in zip(completions, expected, strict=True)]

    def _read_reference(self, reference: str) -> float | None:
        part = find_part(self._pattern, reference)
        return read_number(reference if part is None else part)

    def _judge(self, completion: str, expected: float | None) -> float:
        part = find_part(self._pattern, completion)
        given = None if part is None else read_number(part)
        if given is None or expected is None:
            return 0.0
        return float(math.isclose(given, expected, rel_tol=self._relative_tolerance))


def read_number(text: str) -> float | None:
    """Return the last number in a text: `1,234.5`, `2e3`, `3/4` and `12 %`, which is 0.12; None if there is none."""
    last = next(iter([*_FOUND.finditer(text)][-1:]), None)
    if last is None or len(last[0]) > _MOST_CHARACTERS:
        return None
    value, below = (float(part.replace(",", "").replace(_MINUS, "-")) if part else None for part in last.groups()[:2])
    assert value is not None, "the pattern has a number"
    if below is not None:
        if below == 0:
            return None
        value /= below
    value = value / 100 if last[3] else value
    return value if math.isfinite(value) else None
