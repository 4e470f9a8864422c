"""A checkpoint of any strategy resumes under any other, on any number of ranks: weights, optimizer state, position."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import IS_LONG, NUM_STEPS, STRATEGIES, case, largest_difference
from ranks import run_on_ranks
from safetensors.torch import load_file
from support import composed_config, resolved

from recipes.build import build
from recipes.mode.export import export

HALF = NUM_STEPS // 2
ENGINES = ["ddp", "fsdp", "fsdp, cpu offload", "ZeRO-1", "ZeRO-2, offload", "ZeRO-3"]
ENGINES = ENGINES if IS_LONG else ["ddp", "fsdp, cpu offload", "ZeRO-2, offload", "ZeRO-3"]
# each engine resumes from itself, and from the engine half the list further
PAIRS = [(name, name) for name in ENGINES]
PAIRS += [(ENGINES[(index + len(ENGINES) // 2) % len(ENGINES)], name) for index, name in enumerate(ENGINES)]
# from two ranks to four
WIDER = [("ddp", "fsdp"), ("ZeRO-3", "hsdp")]
WIDER += [("fsdp", "ddp"), ("ZeRO-2, offload", "ZeRO-3")] if IS_LONG else []


def _case(name: str, *more: str, world_size: int) -> dict[str, Any]:
    base = case("gpt2", strategy=STRATEGIES[name], precision="32-true", accumulate=2, world_size=world_size)
    overrides = [override for override in base["overrides"] if not override.startswith("save_every")]
    return base | {"overrides": [*overrides, f"save_every={HALF}", *more]}


def _checkpoint(folder: Path, number: int) -> str:
    return f"resume={folder}/results.json.{number}/checkpoints/step_{HALF:07d}.ckpt"


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run every engine from the start, then from the middle of another; one device from the middle of each."""
    first, second, alone = (tmp_path_factory.mktemp(name) for name in ("first", "second", "alone"))
    uninterrupted = run_on_ranks({name: _case(name, world_size=2) for name in ENGINES}, world_size=2, folder=first)
    resumed = {
        f"{origin} -> {name}": _case(name, _checkpoint(first, ENGINES.index(origin)), world_size=2)
        for origin, name in PAIRS
    }
    results = run_on_ranks(resumed, world_size=2, folder=second)
    on_one = {"single": _case("single", world_size=1)} | {
        f"{origin} -> single": _case("single", _checkpoint(first, ENGINES.index(origin)), world_size=1)
        for origin in ENGINES
    }
    single = run_on_ranks(on_one, world_size=1, folder=alone)
    return uninterrupted | results | single | {"folder": first}


@pytest.fixture(scope="module")
def four(curves: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run on four ranks: DDP from the start and from its own middle, others from the middle of two ranks."""
    folder, two = tmp_path_factory.mktemp("four"), curves["folder"]
    cases = {
        "ddp": _case("ddp", world_size=4),
        "ddp -> ddp": _case("ddp", _checkpoint(folder, 0), world_size=4),
    } | {
        f"{origin} of 2 -> {name} of 4": _case(name, _checkpoint(two, ENGINES.index(origin)), world_size=4)
        for origin, name in WIDER
    }
    return run_on_ranks(cases, world_size=4, folder=folder)


@pytest.mark.parametrize(
    "name",
    [f"{origin} -> {name}" for origin, name in PAIRS] + [f"{name} -> single" for name in ENGINES],
)
def test_a_run_resumed_under_another_strategy_follows_the_curve_of_one_device(
    name: str, curves: dict[str, Any]
) -> None:
    for run in ("single", name):
        assert "error" not in curves[run], curves[run]["error"]
    rows = curves[name]["rows"]
    assert [row["step"] for row in rows] == list(range(HALF + 1, NUM_STEPS + 1))
    # float32 sums in another order, over at most twenty steps: see test_parity.py
    assert max(largest_difference(rows, curves["single"]["rows"][HALF:]).values()) <= 1e-5
    for row, other in zip(rows, curves["single"]["rows"][HALF:], strict=True):
        assert row["train/samples"] == other["train/samples"]
        assert row["lr"] == other["lr"]


@pytest.mark.parametrize("name", ENGINES)
def test_a_run_resumed_under_its_own_strategy_equals_an_uninterrupted_run_bit_for_bit(
    name: str, curves: dict[str, Any]
) -> None:
    rows, undisturbed = curves[f"{name} -> {name}"]["rows"], curves[name]["rows"][HALF:]
    assert largest_difference(rows, undisturbed) == {"train/loss": 0, "grad/norm": 0}


def test_resumed_ddp_on_four_ranks_is_bit_equal_although_buckets_decide_the_order_of_sums(
    four: dict[str, Any],
) -> None:
    rows, undisturbed = four["ddp -> ddp"]["rows"], four["ddp"]["rows"][HALF:]
    assert largest_difference(rows, undisturbed) == {"train/loss": 0, "grad/norm": 0}


@pytest.mark.parametrize("name", [f"{origin} of 2 -> {name} of 4" for origin, name in WIDER])
def test_a_run_of_two_ranks_resumed_on_four_follows_the_curve_of_one_device(
    name: str, curves: dict[str, Any], four: dict[str, Any]
) -> None:
    assert "error" not in four[name], four[name]["error"]
    rows, alone = four[name]["rows"], curves["single"]["rows"][HALF:]
    assert max(largest_difference(rows, alone).values()) <= 1e-5  # as above
    assert [row["train/samples"] for row in rows] == [row["train/samples"] for row in alone]


def test_an_export_has_the_weights_of_whatever_strategy_wrote_them(curves: dict[str, Any], tmp_path: Path) -> None:
    exported = []
    for number, name in enumerate(ENGINES):
        overrides = [*_case("single", world_size=1)["overrides"], "mode=export"]
        config = composed_config(*overrides, _checkpoint(curves["folder"], number))
        target = tmp_path / str(number)
        settings: dict[str, Any] = {"format": "auto", "dtype": None, "push_to": None, "private": True}
        settings |= {"path": str(target), "weights": "trained", "adapter": "merged"}
        assert export(build(resolved(config, tmp_path)), **settings) == 0, name
        exported.append(load_file(target / "model.safetensors"))
    assert all(weights.keys() == exported[0].keys() for weights in exported)
    largest = max((weights[key] - exported[0][key]).abs().max().item() for weights in exported for key in weights)
    # Adam moves a weight by up to 1e-3 a step where a gradient near zero changes its sign: ten steps apart at most
    assert largest <= 1e-2
    num_different = sum(
        torch.isclose(weights[key], exported[0][key], rtol=1e-4, atol=1e-5).logical_not().sum()
        for weights in exported
        for key in weights
    )
    assert num_different <= 20  # of some 30,000: those that such a sign change has moved


def test_the_middle_of_a_run_is_not_its_beginning(curves: dict[str, Any]) -> None:
    """The control of the tests above: a lost optimizer state would show, because a fresh start has another curve."""
    rows = curves["single"]["rows"]
    assert largest_difference(rows[:HALF], rows[HALF:])["train/loss"] > 1e-3
