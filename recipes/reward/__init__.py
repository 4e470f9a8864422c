"""Rewards: functions that score generated text. Standard library only; nothing that a model writes is executed.

A reward is called with four lists, an entry each for every completion, and returns a number for each:

    def brevity(prompts, completions, references, rows):
        return [1.0 / (1 + len(completion)) for completion in completions]
"""

import logging
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from recipes.errors import ConfigError

LOGGER = logging.getLogger("lightning_recipes")
TOTAL = "reward"


class Reward(Protocol):
    """One option of conf/reward.

    It may have a method `load()` for what takes long or cannot be pickled, such as reading a model: it is called once,
    before the first call, in the process that calls the function.

    Attributes:
        weight: Factor of its scores in the sum of all rewards.

    With the constant `reads_tokens = True` it is called with a fifth list, `tokens`: those of each prompt with its
    completion, as the model has read and sampled them, and with the token that ends it if there is one.
    """

    weight: float

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        references: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> Sequence[float]:
        """Return the score of each completion.

        Args:
            prompts: What each completion continues.
            completions: Generated texts.
            references: Expected texts; empty where the data has none.
            rows: Fields of the row of data that each prompt comes from; empty where they are not known.
        """


class Rewards:
    """Several rewards, and their weighted sum.

    A function that raises for some completions gives these 0, with one line in the log; one that raises for all of its
    first call is a mistake.

    Args:
        functions: Rewards by name; None is left out.

    Attributes:
        reads_tokens: Whether one of them reads tokens.
    """

    def __init__(self, *, functions: Mapping[str, Reward | None]) -> None:
        self._functions = {name: function for name, function in functions.items() if function is not None}
        self.reads_tokens = any(map(reads_tokens, self._functions.values()))
        for function in self._functions.values():
            if hasattr(function, "load"):
                function.load()
        self._has_worked: set[str] = set()
        self._has_warned: set[str] = set()

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        references: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, list[float]]:
        """Return a score of each completion: under `reward` the weighted sum, under `reward/<name>` that of a function.

        Empty without functions.

        Raises:
            ConfigError: A function works for no completion, or returns something else than a finite number for each.
        """
        given: dict[str, Sequence[Any]] = {"prompts": prompts, "completions": completions, "references": references}
        given |= {"rows": rows} | ({} if tokens is None else {"tokens": tokens})
        scores = {name: self._score(name, given) for name in self._functions}
        if not scores:
            return {}
        return name_scores(sum_weighted(self._functions, scores, len(completions)), scores)

    def _score(self, name: str, given: Mapping[str, Sequence[Any]]) -> list[float]:
        count = len(given["completions"])
        try:
            found = call(self._functions[name], given)
        except ConfigError:
            raise
        except Exception as error:  # of a function of the user's
            return self._score_one_by_one(name, given, error)
        self._has_worked.add(name)
        return check_scores(name, found, count)

    def _score_one_by_one(self, name: str, given: Mapping[str, Sequence[Any]], error: Exception) -> list[float]:
        """Score each completion alone, so that one that a function cannot handle costs the others nothing."""
        scores: list[float] = []
        num_failed = 0
        for index in range(len(given["completions"])):
            try:
                found = call(self._functions[name], {key: values[index : index + 1] for key, values in given.items()})
            except Exception as of_one:
                num_failed += 1
                error = of_one
                scores.append(0.0)
            else:
                scores += check_scores(name, found, 1)
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        if num_failed == len(scores) and name not in self._has_worked:
            reason = f"it raises {what} for every completion"
            raise ConfigError(f"reward.{name}", reason, f"reward.{name}=null, or the same command once it is corrected")
        self._has_worked.add(name)
        if num_failed and name not in self._has_warned:
            self._has_warned.add(name)
            LOGGER.warning(
                "reward.%s raised %s for %d of %d completions, which count as 0; later ones are not logged",
                *(name, what, num_failed, len(scores)),
            )
        return scores


def reads_tokens(function: Reward) -> bool:
    """Return whether a function is called with tokens, too."""
    return bool(getattr(function, "reads_tokens", False))


def call(function: Reward, given: Mapping[str, Sequence[Any]]) -> Sequence[float]:
    """Return what a function says of completions, from the lists that it reads."""
    return function(**{name: values for name, values in given.items() if name != "tokens" or reads_tokens(function)})


def sum_weighted(
    functions: Mapping[str, Reward], scores: Mapping[str, Sequence[float]], num_completions: int
) -> list[float]:
    """Return the weighted sum of all functions for each completion."""
    return [
        math.fsum(functions[name].weight * values[index] for name, values in scores.items())
        for index in range(num_completions)
    ]


def name_scores(total: list[float], of_functions: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return scores by the names that they are logged and written under."""
    return {TOTAL: total} | {f"{TOTAL}/{name}": values for name, values in of_functions.items()}


def check_scores(name: str, found: object, count: int) -> list[float]:
    """Return the scores as floats.

    Raises:
        ConfigError: They are not one finite number for each completion.
    """
    found = found.tolist() if hasattr(found, "tolist") else found  # an array, or a tensor on any device
    values = list(found) if isinstance(found, Sequence) and not isinstance(found, str) else None
    fix = f"a list with a finite number for each completion as its result, or reward.{name}=null"
    if values is None or len(values) != count:
        kind = type(found).__name__ if values is None else f"{len(values)} scores"
        raise ConfigError(f"reward.{name}", f"it returned {kind} for {count} completions", fix)
    for value in values:
        if not isinstance(value, numbers.Real) or not math.isfinite(value):  # also float32 of numpy
            raise ConfigError(f"reward.{name}", f"it returned {value!r} for a completion", fix)
    return [float(value) for value in values]


def compile_pattern(name: str, pattern: str | None, *, instead: str = "None") -> re.Pattern[str] | None:
    """Return a compiled regular expression; None for None.

    Args:
        name: Argument that it is the value of.
        pattern: Regular expression, in which `.` matches line breaks too.
        instead: What to set if it is not a valid one.

    Raises:
        ValueError: It is not a valid one.
    """
    try:
        return None if pattern is None else re.compile(pattern, re.DOTALL)
    except re.error as error:
        why = f"it is not a valid regular expression: {error}"
        raise ValueError(f"{name} is {pattern!r}; {why}; set {instead}") from error


def find_part(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """Return the text to score: the first group of the last match, or the whole match if the pattern has no group.

    None if there is no match. Without a pattern, the text without surrounding whitespace.
    """
    if pattern is None:
        return text.strip()
    matches = list(pattern.finditer(text))
    found = matches[-1].group(1 if pattern.groups else 0) if matches else None
    return None if found is None else str(found)
