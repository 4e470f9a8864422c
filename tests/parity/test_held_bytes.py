"""The bytes that a rank holds follow the arithmetic of its stage: counted on two real ranks, storage by storage."""

from collections.abc import Callable
from typing import Any

import pytest
from cases import IS_LONG, memory_case
from held_bytes import bytes_per_parameter

ENGINES = ["fsdp", "ZeRO-1", "ZeRO-2", *(["ddp", "ZeRO-3"] if IS_LONG else [])]
CASES = {name: memory_case(name, world_size=2, num_layers=2) for name in ENGINES}
# bytes per parameter: DeepSpeed's communication bucket holds at most an eighth of the model
BUCKET = 4 / 8


@pytest.mark.parametrize("name", ENGINES)
def test_a_rank_holds_the_bytes_of_its_stage(name: str, run_group: Callable[..., Any]) -> None:
    result = run_group("memory", CASES, world_size=2)[name]
    assert "error" not in result, result["error"]
    expected = bytes_per_parameter(name, 2)
    held = result["held_bytes"] / result["num_parameters"]
    # 2 %: the last gradients on their way into a bucket, and vectors that ZeRO-3 does not partition
    assert expected * 0.99 <= held <= expected * 1.02 + BUCKET
