"""A float16 overflow on one rank skips the step on all ranks, and every engine counts it the same way."""

from collections.abc import Callable
from typing import Any

import pytest
from cases import IS_LONG, overflow_case, shortened
from ranks import run_on_ranks

ENGINES = ["ddp", "fsdp", "fsdp, cpu offload", "hsdp", "ZeRO-1", "ZeRO-2, offload", "ZeRO-3", "tp2", "cp2, ddp", "pp2"]
ALONE = {"single": overflow_case("single", world_size=1)}
TWO = {name: overflow_case(name, world_size=2) for name in ENGINES}
TWO |= {"ep2": overflow_case("ep2", world_size=2, model="experts")}
TWO = shortened(TWO, "ddp", "fsdp", "hsdp", "ZeRO-2, offload", "ZeRO-3", "pp2")
ALONE |= {"experts": overflow_case("single", world_size=1, model="experts")}


@pytest.mark.parametrize("name", TWO)
def test_an_overflow_on_one_rank_is_skipped_and_counted_as_on_one_device(
    name: str, rows: Callable[..., list[dict[str, float]]]
) -> None:
    expected = rows("overflow alone", ALONE, "experts" if name == "ep2" else "single", world_size=1)
    found = rows("overflow", TWO, name, world_size=2)
    assert [row["precision/overflow_steps"] for row in found] == [0, 0, 1, 1, 1, 1]
    scales = [row["precision/loss_scale"] for row in found]
    assert scales == [2.0**16] * 2 + [2.0**15] * 4
    assert scales == [row["precision/loss_scale"] for row in expected]
    for step in (0, 1, 3, 4, 5):
        # float16 products in another order; weights that had stepped would differ in the second digit
        assert found[step]["train/loss"] == pytest.approx(expected[step]["train/loss"], rel=1e-4)
    assert not found[2]["grad/norm"] < float("inf")


def test_the_step_after_a_skipped_one_sees_the_same_weights(
    rows: Callable[..., list[dict[str, float]]], run_group: Callable[..., Any]
) -> None:
    """The control of the test above: it would notice a step that was not skipped."""
    found = rows("overflow alone", ALONE, "single", world_size=1)
    losses = [row["train/loss"] for row in found]
    assert losses[2] > 1e20
    assert abs(losses[3] / losses[1] - 1) < 0.05


PAIRS = [("ddp", "ddp"), ("ZeRO-3", "ZeRO-3"), ("ddp", "ZeRO-3")]
PAIRS += [("ZeRO-1", "ZeRO-1"), ("ZeRO-1", "fsdp")] if IS_LONG else []


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Resume each pair from step 4, after the overflow."""
    origins = sorted({origin for origin, _ in PAIRS})
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    run_on_ranks({name: overflow_case(name, world_size=2) for name in origins}, world_size=2, folder=first)
    folders = {name: first / f"results.json.{number}" for number, name in enumerate(origins)}
    cases = {
        f"{origin} -> {name}": overflow_case(
            name, f"resume={folders[origin]}/checkpoints/step_0000004.ckpt", world_size=2
        )
        for origin, name in PAIRS
    }
    return run_on_ranks(cases, world_size=2, folder=second)


@pytest.mark.parametrize("name", [f"{origin} -> {name}" for origin, name in PAIRS])
def test_a_resumed_run_keeps_the_loss_scale_and_the_count(name: str, resumed: dict[str, Any]) -> None:
    assert "error" not in resumed[name], resumed[name]["error"]
    rows = resumed[name]["rows"]
    assert [row["precision/loss_scale"] for row in rows] == [2.0**15] * 2
    assert [row["precision/overflow_steps"] for row in rows] == [1, 1]
