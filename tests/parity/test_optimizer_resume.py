"""Every optimizer resumes from every pipeline schedule, on its own mesh and others, whatever it keeps in its state."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from cases import IS_LONG, case, largest_difference
from ranks import run_on_ranks

WORKER = Path(__file__).parent / "mesh_resume_ranks.py"
STEPS, HALF = 6, 3
# learning rates with which the loss falls within six steps
OPTIMIZERS = {
    "adamw": "3e-3",
    "adam": "3e-3",
    "sgd": "0.3",
    "lion": "1e-3",
    "adafactor": "0.1",
    "muon": "3e-3",
    "schedule_free": "3e-3",
    "adamw_8bit": "3e-3",
}
KEEPERS = {
    name: {"_target_": "keeper.Keeper", "_partial_": True, "lr": 0.2, "by_shard": by_shard, "has_top": has_top}
    for name, by_shard, has_top in (
        ("keeper", False, True),
        ("keeper by shard", True, True),
        ("keeper by partition", True, False),
    )
}
_PIPELINE = ["strategy=fsdp", "model.num_layers=4"]
# name -> overrides and number of ranks
MESHES: dict[str, tuple[list[str], int]] = {
    "single": (["strategy=single", "model.num_layers=4"], 1),
    "fsdp": (["strategy=fsdp", "model.num_layers=4"], 2),
    "ZeRO-1": (["strategy=deepspeed_stage_1", "model.num_layers=4"], 2),
    "ZeRO-3": (["strategy=deepspeed_stage_3", "model.num_layers=4"], 2),
    "1F1B": ([*_PIPELINE, "pipeline_parallel_size=2"], 2),
    "interleaved": ([*_PIPELINE, "pipeline_parallel_size=2", "pipeline_schedule=Interleaved1F1B"], 2),
    "zero bubble": ([*_PIPELINE, "pipeline_parallel_size=2", "pipeline_schedule=ZBVZeroBubble"], 2),
    "four stages": ([*_PIPELINE, "pipeline_parallel_size=4"], 4),
}
SCHEDULES = ["1F1B", "interleaved", "zero bubble", "four stages"]
if IS_LONG:
    PAIRS = [
        (optimizer, schedule, target)
        for optimizer, schedule in itertools.product([*OPTIMIZERS, "keeper"], SCHEDULES)
        for target in (schedule, "single", "fsdp")
    ]
else:
    PAIRS = [("schedule_free", "zero bubble", target) for target in ("zero bubble", "single")]
    PAIRS += [("adafactor", "1F1B", "1F1B"), ("keeper", "1F1B", "single")]
PAIRS += [("keeper", "fsdp", "1F1B"), *([("keeper", "1F1B", "1F1B")] if IS_LONG else [])]
PAIRS += [("keeper by shard", "fsdp", "fsdp"), ("keeper by shard", "single", "single")]
PAIRS += [("keeper by partition", engine, engine) for engine in ("ZeRO-1", "ZeRO-3")]
REFUSED = [("keeper by shard", "fsdp", "single"), ("keeper by partition", "ZeRO-1", "fsdp")]
REFUSED += [("keeper by shard", "single", "ZeRO-1")]


def make_case(optimizer: str, mesh: str, *more: str) -> dict[str, Any]:
    overrides, world_size = MESHES[mesh]
    made = case("gpt2", strategy=overrides, precision="32-true", accumulate=4, world_size=world_size)
    replaced = ("save_every", "trainer.max_steps", "eval_every", "optimizer.lr", "model.num_layers=2")
    kept = [override for override in made["overrides"] if not override.startswith(replaced)]
    kept += [f"save_every={HALF}", f"trainer.max_steps={STEPS}", f"eval_every={STEPS}"]
    if optimizer in KEEPERS:
        return made | {"overrides": [*kept, *more], "optimizer": KEEPERS[optimizer]}
    return made | {"overrides": [*kept, f"optimizer={optimizer}", f"optimizer.lr={OPTIMIZERS[optimizer]}", *more]}


def run(cases: dict[tuple[str, str, str], dict[str, Any]], folder: Path) -> tuple[dict[Any, Any], dict[Any, Path]]:
    """Run cases by (optimizer, origin, mesh), those of as many ranks in one group; return results and folders."""
    results: dict[Any, Any] = {}
    folders: dict[Any, Path] = {}
    for world_size in sorted({MESHES[mesh][1] for _, _, mesh in cases}):
        keys = [key for key in cases if MESHES[key[2]][1] == world_size]
        own = folder / str(world_size)
        found = run_on_ranks({str(key): cases[key] for key in keys}, world_size=world_size, folder=own, worker=WORKER)
        results |= {key: found[str(key)] for key in keys}
        folders |= {key: own / f"results.json.{number}" for number, key in enumerate(keys)}
    return results, folders


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Run every origin and one device from the start, then the pairs from the middle."""
    wanted = [*PAIRS, *REFUSED]
    origins = {(optimizer, "", mesh) for optimizer, origin, _ in wanted for mesh in (origin, "single")}
    first, folders = run({key: make_case(key[0], key[2]) for key in sorted(origins)}, tmp_path_factory.mktemp("first"))
    resumed, _ = run(
        {
            (optimizer, origin, target): make_case(
                optimizer, target, f"resume={folders[optimizer, '', origin]}/checkpoints/step_{HALF:07d}.ckpt"
            )
            for optimizer, origin, target in wanted
        },
        tmp_path_factory.mktemp("second"),
    )
    return first | resumed


@pytest.mark.parametrize(("optimizer", "origin", "target"), PAIRS)
def test_a_resumed_run_has_loaded_all_and_follows_the_curve_of_one_device(
    optimizer: str, origin: str, target: str, curves: dict[Any, Any]
) -> None:
    result, undisturbed = curves[optimizer, origin, target], curves[optimizer, "", origin]
    for run_result in (result, undisturbed):
        assert "error" not in run_result, run_result["error"]
    assert result["differing"] == []
    assert [row["step"] for row in result["rows"]] == list(range(HALF + 1, STEPS + 1))
    if origin == target:
        expected = {"train/loss": 0, "grad/norm": 0}
        assert largest_difference(result["rows"], undisturbed["rows"][HALF:]) == expected
    if not optimizer.startswith("keeper by"):  # which depend on the shards
        alone = curves[optimizer, "", "single"]["rows"][HALF:]
        # float32 sums in another order: see test_mesh.py and test_optimizers.py
        assert max(largest_difference(result["rows"], alone).values()) <= 1e-5


@pytest.mark.parametrize(
    ("pair", "reason"),
    list(
        zip(
            REFUSED,
            (
                "keep different values of .*(size|history)",
                "keep different values of the partitions of ZeRO",
                "holds num_calls",
            ),
            strict=True,
        )
    ),
)
def test_values_that_have_no_place_on_another_mesh_are_rejected(
    pair: tuple[str, str, str], reason: str, curves: dict[Any, Any]
) -> None:
    assert re.search(f"ConfigError: .*{reason}", curves[pair]["error"], re.DOTALL), curves[pair]["error"]


@pytest.mark.parametrize("name", KEEPERS)
def test_each_value_that_the_keeper_keeps_changes_its_steps(name: str, curves: dict[Any, Any]) -> None:
    """The control: a run from the start does not follow the second half of the curve."""
    rows = curves[name, "", "single"]["rows"]
    assert rows[0]["train/loss"] - rows[-1]["train/loss"] > 0.001
    assert largest_difference(rows[:HALF], rows[HALF:])["train/loss"] > 1e-3
