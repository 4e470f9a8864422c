"""A frozen half under every engine: the curve of one device, no bit of it changed, and a whole checkpoint to resume.

The embedding, the positions and the first block are frozen, which is all of a pipeline's first stage; the layers that
are trained have learning rates of their own.
"""

from pathlib import Path
from typing import Any

import pytest
from cases import ENGINES, IS_LONG, case, largest_difference
from frozen_ranks import train
from ranks import run_on_ranks

WORKER = Path(__file__).parent / "frozen_ranks.py"
SHORT = ["fsdp", "pp2"]  # frozen weights under ZeRO-3: beside adapters, in test_adapters.py
LONG = ["ZeRO-3", "ddp", "fsdp, cpu offload", "hsdp", "ZeRO-1", "ZeRO-2", "ZeRO-2, offload", "tp2", "pp2, zero bubble"]
ON_TWO = [*SHORT, *(LONG if IS_LONG else [])]
FROZEN = ("embedding.", "position.", "blocks.0.")
RULES = [
    "freeze=['^embedding','^position','^blocks[.]0[.]']",
    "optimizer.layer_decay=0.75",
    "optimizer.groups=[{match: '[.]mlp[.]', weight_decay: 0.5}]",
    "model.tie_embeddings=false",
]


def make_case(name: str, *more: str, world_size: int) -> dict[str, Any]:
    made = case("gpt2", strategy=ENGINES[name], precision="32-true", accumulate=2, world_size=world_size)
    kept = [override for override in made["overrides"] if not override.startswith("save_every")]
    # a zero-bubble schedule has two stages on a rank
    layers = ["model.num_layers=4"] if "bubble" in name else []
    steps = ("trainer.max_steps=4", "eval_every=4", "save_every=2", "ema_decay=0.9")
    return made | {"overrides": [*kept, *steps, *RULES, *layers, *more]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {name: make_case(name, world_size=2) for name in ON_TWO}
    found: dict[str, Any] = run_on_ranks(cases, world_size=2, folder=tmp_path_factory.mktemp("frozen"), worker=WORKER)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """Return the rows of one device, by number of layers."""
    folders = {layers: tmp_path_factory.mktemp(f"alone {layers}") for layers in (2, *([4] if IS_LONG else []))}
    return {
        str(layers): train(make_case("single", f"model.num_layers={layers}", world_size=1), folder)[1]
        for layers, folder in folders.items()
    }


@pytest.mark.parametrize("name", ON_TWO)
def test_a_frozen_half_trains_resumes_and_stays_as_it_was(name: str, results: dict[str, Any], alone: Any) -> None:
    result = results[name]
    assert "error" not in result, result["error"]
    difference = largest_difference(result["rows"], alone["4" if "bubble" in name else "2"])
    assert difference["train/loss"] < 1e-5  # float32: other orders of the same sums
    assert difference["grad/norm"] < 1e-5
    for key in ("train/loss", "grad/norm", "val/loss", "lr/layer_2_decay"):
        assert result["rows"][-1][key] == result["resumed"][-1][key], key
    assert result["changed"] == result["with_state"]
    assert not [key for key in result["changed"] if key.startswith(FROZEN)]
    assert {key.partition(".")[0] for key in result["changed"]} == {"blocks", "norm", "head"}


def test_learning_rates_of_groups_are_logged_and_the_first_is_that_of_the_config(alone: Any) -> None:
    row = alone["2"][-1]
    # step 4 of a warm-up of 5; the head, then the second of two blocks
    assert row["lr"] == row["lr/layer_3_decay"] == pytest.approx(8e-4)
    assert row["lr/layer_2_decay"] == row["lr/layer_2_mlp_decay"] == pytest.approx(6e-4)


def test_a_frozen_stage_trains_nothing_on_its_rank(results: dict[str, Any]) -> None:
    assert results["pp2"]["trained_here"] == []  # of rank 0
    assert results["fsdp"]["trained_here"]
    assert not any(key.startswith(FROZEN) for key in results["fsdp"]["trained_here"])
