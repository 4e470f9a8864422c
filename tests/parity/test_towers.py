"""A model with two towers of blocks under engines that shard block by block: the curve of one device."""

from typing import Any

import pytest
from cases import IS_LONG, STRATEGIES, case, largest_difference

ON_TWO = ("fsdp", "ZeRO-3", *(("ddp", "fsdp, gradient sync per step") if IS_LONG else ()))


def make_case(name: str, *more: str, world_size: int) -> dict[str, Any]:
    made = case("gpt2", strategy=STRATEGIES[name], precision="32-true", accumulate=2, world_size=world_size)
    return made | {"overrides": [*made["overrides"], "model._target_=small_models.TwoTowers", *more]}


@pytest.fixture
def curve(rows: Any) -> Any:
    def find(name: str, size: int) -> list[dict[str, float]]:
        names, group = (("single",), "a tower") if size == 1 else (ON_TWO, "towers")
        cases = {key: make_case(key, world_size=size) for key in names}
        found: list[dict[str, float]] = rows(group, cases, name, world_size=size)
        return found

    return find


@pytest.mark.parametrize("name", ON_TWO)
def test_two_towers_have_the_curve_of_one_device(name: str, curve: Any) -> None:
    difference = largest_difference(curve(name, 2), curve("single", 1))
    # float32: other orders of the same sums
    assert difference["train/loss"] < 1e-5
    assert difference["grad/norm"] < 1e-4
