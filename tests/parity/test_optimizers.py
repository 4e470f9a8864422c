"""Optimizers other than AdamW give the curve of one device under every engine that they support, and resume on it."""

from pathlib import Path
from typing import Any

import pytest
from cases import IS_LONG, NUM_STEPS, STRATEGIES, case, largest_difference
from ranks import run_on_ranks
from run_cases import run_case

HALF = NUM_STEPS // 2
# learning rates with which the loss falls within eight steps
OPTIMIZERS = {
    "lion": ["optimizer=lion", "optimizer.lr=1e-3"],
    "adafactor": ["optimizer=adafactor", "optimizer.lr=0.1"],
    "muon": ["optimizer=muon", "optimizer.lr=3e-3"],
    "schedule_free": ["optimizer=schedule_free", "optimizer.lr=3e-3"],
    "adamw_8bit": ["optimizer=adamw_8bit", "optimizer.lr=3e-3"],
    # a rate that each second validation halves, with what validation finds on all ranks together
    "plateau": [
        *("scheduler=plateau", "scheduler.patience=0", "scheduler.threshold=1.0", "scheduler.factor=0.5"),
        *("eval_every=2", "optimizer.lr=1e-2"),
    ],
}
ON_TWO = [(optimizer, engine) for optimizer in OPTIMIZERS for engine in ("ddp", "fsdp")]
ON_TWO += [(name, engine) for name in ("lion", "plateau") for engine in ("ZeRO-1", "ZeRO-2, offload", "ZeRO-3")]
if not IS_LONG:
    ON_TWO = [(optimizer, "fsdp") for optimizer in OPTIMIZERS] + [("lion", "ZeRO-3"), ("muon", "ddp")]
    ON_TWO += [("plateau", "ZeRO-3")]
# optimizer, engine that wrote the checkpoint, engine that resumes
RESUMED = [("muon", "ddp", "ddp"), ("adamw_8bit", "fsdp", "fsdp"), ("muon", "single", "fsdp")]
RESUMED += [("lion", "ZeRO-3", "ZeRO-3"), ("lion", "ZeRO-3", "fsdp")]
RESUMED += [("plateau", "fsdp", "fsdp"), ("plateau", "ZeRO-3", "fsdp")]
ON_ONE = [("adamw_8bit", "fsdp"), ("adafactor", "fsdp")]
if IS_LONG:  # test_optimizer_resume.py has these from a pipeline, which has the same shards
    RESUMED += [(optimizer, "fsdp", "fsdp") for optimizer in ("adafactor", "muon", "schedule_free")]
    RESUMED += [("adafactor", "single", "fsdp")]
    ON_ONE += [("muon", "fsdp"), ("muon", "single"), ("lion", "ZeRO-2, offload")]


def make_case(optimizer: str, engine: str, *more: str, world_size: int) -> dict[str, Any]:
    accumulate = 2 if world_size == 2 else 1
    base = case("gpt2", strategy=STRATEGIES[engine], precision="32-true", accumulate=accumulate, world_size=world_size)
    replaced = ("save_every", "optimizer.lr")
    overrides = [override for override in base["overrides"] if not override.startswith(replaced)]
    return base | {"overrides": [*overrides, *OPTIMIZERS[optimizer], f"save_every={HALF}", *more]}


def run_here(cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Run cases of one device in this process."""
    results = {}
    for name, each in cases.items():
        (folder / name).mkdir(parents=True)
        results[name] = run_case(each, folder / name)
    return results


def _resume_from(run_folder: Path) -> str:
    return f"resume={run_folder}/checkpoints/step_{HALF:07d}.ckpt"


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run everything from the start, then what resumes; two ranks are started once."""
    alone, two = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("two")
    found = run_here({f"{name} single": make_case(name, "single", world_size=1) for name in OPTIMIZERS}, alone)
    cases = {f"{name} {engine}": make_case(name, engine, world_size=2) for name, engine in ON_TWO}
    folders = {name: two / f"results.json.{number}" for number, name in enumerate(cases)}
    folders |= {name: alone / name for name in found}
    for name, origin, engine in RESUMED:
        resume = _resume_from(folders[f"{name} {origin}"])
        cases[f"{name} {origin} -> {engine}"] = make_case(name, engine, resume, world_size=2)
    found |= run_on_ranks(cases, world_size=2, folder=two)
    resumed = {
        f"{name} {origin} -> single": make_case(name, "single", _resume_from(folders[f"{name} {origin}"]), world_size=1)
        for name, origin in ON_ONE
    }
    found |= run_here(resumed, alone)
    for name, result in found.items():
        assert "error" not in result, (name, result["error"])
    return {name: result["rows"] for name, result in found.items()}


@pytest.mark.parametrize(("name", "engine"), ON_TWO)
def test_two_ranks_give_the_curve_of_one_device(name: str, engine: str, curves: dict[str, Any]) -> None:
    # As promised for AdamW, and for the same reason: float32 sums in another order. Lion takes the sign of what may be
    # rounding, and Newton-Schulz multiplies small singular values by up to 485; neither shows in the loss, because
    # such directions are those that it does not depend on.
    assert max(largest_difference(curves[f"{name} {engine}"], curves[f"{name} single"]).values()) <= 1e-5


@pytest.mark.slow  # tests/recipes/optimizer has the same on threads, without the engine
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_replicas_of_two_shards_give_the_curve_of_one_device(
    name: str, curves: dict[str, Any], tmp_path: Path
) -> None:
    [result] = run_on_ranks({name: make_case(name, "hsdp", world_size=4)}, world_size=4, folder=tmp_path).values()
    assert "error" not in result, result["error"]
    assert max(largest_difference(result["rows"], curves[f"{name} single"]).values()) <= 1e-5  # as above


@pytest.mark.parametrize(("name", "origin", "engine"), RESUMED)
def test_a_run_resumes_under_the_same_and_another_engine(
    name: str, origin: str, engine: str, curves: dict[str, Any]
) -> None:
    rows = curves[f"{name} {origin} -> {engine}"]
    assert [row["step"] for row in rows] == list(range(HALF + 1, NUM_STEPS + 1))
    if origin == engine:
        assert largest_difference(rows, curves[f"{name} {engine}"][HALF:]) == {"train/loss": 0, "grad/norm": 0}
    assert max(largest_difference(rows, curves[f"{name} single"][HALF:]).values()) <= 1e-5  # as above


@pytest.mark.parametrize(("name", "origin"), ON_ONE)
def test_a_run_of_two_ranks_resumes_on_one(name: str, origin: str, curves: dict[str, Any]) -> None:
    rows, alone = curves[f"{name} {origin} -> single"], curves[f"{name} single"][HALF:]
    assert max(largest_difference(rows, alone).values()) <= (0 if origin == "single" else 1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_lost_state_or_another_optimizer_would_show(name: str, curves: dict[str, Any]) -> None:
    """The control of the tests above."""
    rows = curves[f"{name} single"]
    assert rows[0]["train/loss"] - rows[-1]["train/loss"] > 0.02
    for other in OPTIMIZERS:
        if other != name:
            assert largest_difference(rows, curves[f"{other} single"])["train/loss"] > 1e-3
    assert largest_difference(rows[:HALF], rows[HALF:])["train/loss"] > 1e-3
