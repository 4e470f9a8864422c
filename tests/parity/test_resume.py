"""A checkpoint of any strategy goes on under any other: weights, moments, schedule and position."""

from pathlib import Path
from typing import Any

import pytest
from cases import NUM_STEPS, STRATEGIES, case, largest_difference
from ranks import run_on_ranks

HALF = NUM_STEPS // 2
ENGINES = ["ddp", "fsdp", "fsdp, cpu offload", "ZeRO-1", "ZeRO-2, offload", "ZeRO-3"]
# each engine goes on from itself, and from the engine three places on
PAIRS = [(name, name) for name in ENGINES]
PAIRS += [(ENGINES[(index + 3) % len(ENGINES)], name) for index, name in enumerate(ENGINES)]


def _case(name: str, *more: str, world_size: int) -> dict[str, Any]:
    made = case(
        "gpt2", strategy=STRATEGIES[name], precision="32-true", accumulate=2, world_size=world_size
    )
    words = [word for word in made["words"] if not word.startswith("save_every")]
    return made | {"words": [*words, f"save_every={HALF}", *more]}


def _checkpoint(folder: Path, number: int) -> str:
    return f"resume={folder}/results.json.{number}/checkpoints/step_{HALF:07d}.ckpt"


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every engine from the beginning, then from the middle of another; one device from the middle of each."""
    first, second, alone = (tmp_path_factory.mktemp(name) for name in ("first", "second", "alone"))
    whole = run_on_ranks(
        {name: _case(name, world_size=2) for name in ENGINES}, world_size=2, folder=first
    )
    again = {
        f"{origin} -> {name}": _case(name, _checkpoint(first, ENGINES.index(origin)), world_size=2)
        for origin, name in PAIRS
    }
    results = run_on_ranks(again, world_size=2, folder=second)
    one = {"single": _case("single", world_size=1)} | {
        f"{origin} -> single": _case(
            "single", _checkpoint(first, ENGINES.index(origin)), world_size=1
        )
        for origin in ENGINES
    }
    return whole | results | run_on_ranks(one, world_size=1, folder=alone)


@pytest.mark.parametrize(
    "name",
    [f"{origin} -> {name}" for origin, name in PAIRS] + [f"{name} -> single" for name in ENGINES],
)
def test_a_run_goes_on_under_another_strategy_as_one_device_would(
    name: str, curves: dict[str, Any]
) -> None:
    for run in ("single", name):
        assert "error" not in curves[run], curves[run]["error"]
    rows = curves[name]["rows"]
    assert [row["step"] for row in rows] == list(range(HALF + 1, NUM_STEPS + 1))
    # float32 sums in another order, over twenty steps: see test_parity.py
    assert max(largest_difference(rows, curves["single"]["rows"][HALF:]).values()) <= 1e-5
    for row, other in zip(rows, curves["single"]["rows"][HALF:], strict=True):
        assert row["train/samples"] == other["train/samples"]
        assert row["lr"] == other["lr"]


def test_the_middle_of_a_run_is_not_its_beginning(curves: dict[str, Any]) -> None:
    """So that the test above is known to see moments that were lost: a fresh start has another curve."""
    rows = curves["single"]["rows"]
    assert largest_difference(rows[:HALF], rows[HALF:])["train/loss"] > 1e-3
