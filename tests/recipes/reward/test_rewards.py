"""Rewards: the weighted sum by hand, and what happens to a function that raises or returns something else."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from recipes.errors import ConfigError
from recipes.reward import Rewards


class Function:
    """A reward of the tests: `score` of each completion."""

    def __init__(self, score: Any, weight: float = 1.0) -> None:
        self.score, self.weight = score, weight

    def __call__(self, *, completions: Sequence[str], **given: Any) -> list[float]:
        return [self.score(completion) for completion in completions]


def call(rewards: Rewards, *completions: str) -> dict[str, list[float]]:
    empty = [""] * len(completions)
    return rewards(prompts=empty, completions=completions, references=empty, rows=[{}] * len(completions))


def test_the_sum_is_weighted_and_each_function_is_shown_before_its_weight() -> None:
    functions = {"length": Function(len, 0.5), "late": Function(lambda text: text > "b", -2.0), "off": None}
    assert call(Rewards(functions=functions), "abc", "c") == {
        "reward": [1.5, -1.5],
        "reward/length": [3.0, 1.0],
        "reward/late": [0.0, 1.0],
    }


def test_without_functions_there_are_no_scores() -> None:
    assert call(Rewards(functions={"off": None}), "a") == {}


def test_a_completion_that_a_function_cannot_handle_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rewards = Rewards(functions={"inverse": Function(lambda text: 1 / len(text))})
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        assert call(rewards, "ab", "", "a")["reward"] == [0.5, 0.0, 1.0]
        assert call(rewards, "")["reward"] == [0.0], "it has worked before"
    assert caplog.messages == [
        "reward.inverse raised ZeroDivisionError: division by zero for 1 of 3 completions, which count as 0;"
        " later ones are not logged"
    ]


def test_a_function_that_raises_for_all_of_its_first_call_is_a_mistake() -> None:
    rewards = Rewards(functions={"inverse": Function(lambda text: 1 / len(text))})
    with pytest.raises(ConfigError, match="reward.inverse: it raises ZeroDivisionError: division by zero for every"):
        call(rewards, "", "")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([1.0], "it returned 1 scores for 2 completions"),
        (None, "it returned NoneType for 2 completions"),
        ("ab", "it returned str for 2 completions"),
        ([1.0, float("nan")], "it returned nan for a completion"),
        ([1.0, None], "it returned None for a completion"),
    ],
)
def test_a_reward_is_one_finite_number_for_each_completion(found: Any, message: str) -> None:
    def function(**given: Any) -> Any:
        return found

    function.weight = 1.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=f"reward.own: {message}; type a list"):
        call(Rewards(functions={"own": function}), "a", "b")


@pytest.mark.parametrize("found", [np.array([0.5, 1.0], np.float32), torch.tensor([0.5, 1.0]), [np.float32(0.5), True]])
def test_scores_may_be_an_array_a_tensor_or_numbers_of_numpy(found: Any) -> None:
    def function(**given: Any) -> Any:
        return found

    function.weight = 1.0  # type: ignore[attr-defined]
    assert call(Rewards(functions={"own": function}), "a", "b")["reward"] == [0.5, 1.0]
