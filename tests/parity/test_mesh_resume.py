"""A checkpoint of any mesh resumes on any other and under any strategy: the same tensors bit for bit, one curve."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from cases import ENGINES, IS_LONG, case, largest_difference
from ranks import run_on_ranks

WORKER = Path(__file__).parent / "mesh_resume_ranks.py"
STEPS, HALF = 6, 3
# name -> engine and number of ranks
MESHES = {
    "single": ("single", 1),
    "fsdp": ("fsdp", 2),
    "ZeRO-3": ("ZeRO-3", 2),
    "tp2": ("tp2", 2),
    "pp2": ("pp2", 2),
    "cp2": ("cp2, ZeRO-3", 2),
    "tp2 of 4": ("tp2", 4),
    "pp2 x tp2": ("pp2, tp2", 4),
}
EXPERTS = {
    "experts, single": ("single", 1),
    "experts, fsdp": ("fsdp", 2),
    "experts, ZeRO-3": ("ZeRO-3", 2),
    "experts, ep2": ("ep2", 2),
    "experts, ep2 of 4": ("ep2", 4),
    "experts, pp2": ("pp2", 2),
    "experts, pp2 x ep2": ("pp2, ep2", 4),
}
PAIRS = [*itertools.product(MESHES, repeat=2), *itertools.product(EXPERTS, repeat=2)]
if not IS_LONG:
    MESHES.pop("tp2 of 4")
    EXPERTS.pop("experts, ep2 of 4")
    PAIRS = [
        *(("pp2 x tp2", "pp2 x tp2"), ("cp2", "cp2"), ("ZeRO-3", "pp2"), ("pp2", "cp2")),
        *(("pp2 x tp2", "single"), ("fsdp", "pp2 x tp2"), ("pp2", "ZeRO-3")),
        *(("experts, ep2", target) for target in ("experts, ep2", "experts, single")),
        *(("experts, ZeRO-3", "experts, ep2"),),
    ]
MESHES |= EXPERTS


def _case(name: str, *more: str) -> dict[str, Any]:
    engine, world_size = MESHES[name]
    model = "experts" if name.startswith("experts") else "gpt2"
    made = case(model, strategy=ENGINES[engine], precision="32-true", accumulate=2, world_size=world_size)
    replaced = ("save_every", "trainer.max_steps", "eval_every")
    kept = [override for override in made["overrides"] if not override.startswith(replaced)]
    kept += [f"save_every={HALF}", f"trainer.max_steps={STEPS}", f"eval_every={STEPS}"]
    return made | {"overrides": [*kept, *more]}


def _run(
    cases: dict[str, dict[str, Any]], targets: dict[str, str], folder: Path
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Run cases, those of as many ranks in one group; return the results and the folder of each."""
    results: dict[str, Any] = {}
    folders: dict[str, Path] = {}
    for world_size in sorted({MESHES[target][1] for target in targets.values()}):
        group = {name: made for name, made in cases.items() if MESHES[targets[name]][1] == world_size}
        own = folder / str(world_size)
        results |= run_on_ranks(group, world_size=world_size, folder=own, worker=WORKER)
        folders |= {name: own / f"results.json.{number}" for number, name in enumerate(group)}
    return results, folders


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run every mesh from the start, then the pairs from the middle."""
    first, folders = _run(
        {name: _case(name) for name in MESHES}, {name: name for name in MESHES}, tmp_path_factory.mktemp("first")
    )
    names = {f"{origin} -> {target}": (origin, target) for origin, target in PAIRS}
    checkpoints = {name: folders[name] / f"checkpoints/step_{HALF:07d}.ckpt" for name in MESHES}
    resumed, _ = _run(
        {name: _case(target, f"resume={checkpoints[origin]}") for name, (origin, target) in names.items()},
        {name: target for name, (_, target) in names.items()},
        tmp_path_factory.mktemp("second"),
    )
    return first | resumed


def _alone(name: str) -> str:
    return "experts, single" if name in EXPERTS else "single"


@pytest.mark.parametrize(("origin", "target"), PAIRS)
def test_what_a_mesh_has_loaded_is_what_another_has_saved(origin: str, target: str, curves: dict[str, Any]) -> None:
    result = curves[f"{origin} -> {target}"]
    assert "error" not in result, result["error"]
    assert result["differing"] == []


@pytest.mark.parametrize(("origin", "target"), PAIRS)
def test_a_resumed_run_follows_the_curve_of_one_device(origin: str, target: str, curves: dict[str, Any]) -> None:
    rows, alone = curves[f"{origin} -> {target}"]["rows"], curves[_alone(target)]["rows"][HALF:]
    assert [row["step"] for row in rows] == list(range(HALF + 1, STEPS + 1))
    # float32 sums in another order: see test_mesh.py
    assert max(largest_difference(rows, alone).values()) <= 1e-5
    assert [row["train/samples"] for row in rows] == [row["train/samples"] for row in alone]


@pytest.mark.parametrize("name", [origin for origin, target in PAIRS if origin == target])
def test_a_run_resumed_on_its_own_mesh_equals_an_uninterrupted_one_bit_for_bit(
    name: str, curves: dict[str, Any]
) -> None:
    rows, undisturbed = curves[f"{name} -> {name}"]["rows"], curves[name]["rows"][HALF:]
    assert largest_difference(rows, undisturbed) == {"train/loss": 0, "grad/norm": 0}
