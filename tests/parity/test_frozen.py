"""A frozen half under every engine: the curve of one device, no bit of it changed, and a whole checkpoint to resume.

The embedding, the positions and the first block are frozen, which is all of a pipeline's first stage; the layers that
are trained have learning rates of their own. Blocks that are recomputed or compiled keep the curve, also where the
frozen one stands between trained weights, so that a gradient flows through it.
"""

from pathlib import Path
from typing import Any

import pytest
from cases import ENGINES, IS_LONG, case, largest_difference
from ranks import run_on_ranks

WORKER = Path(__file__).parent / "frozen_ranks.py"
SHORT = ["fsdp", "pp2"]  # frozen weights under ZeRO-3: beside adapters, in test_adapters.py
LONG = ["ZeRO-3", "ddp", "fsdp, cpu offload", "hsdp", "ZeRO-1", "ZeRO-2", "ZeRO-2, offload", "tp2", "pp2, zero bubble"]
ON_TWO = [*SHORT, *(LONG if IS_LONG else [])]
FROZEN = ("embedding.", "position.", "blocks.0.")
TRAINED = {"blocks", "norm", "head"}
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
    counts = {} if "pp2" in name or "compile=true" in more else {"counts_calls": True}
    return made | {"overrides": [*kept, *steps, *RULES, *layers, *more]} | counts


# a block that is frozen between trained weights, and ways to run blocks, which are the last words of a name
BETWEEN = "freeze=['^blocks[.]0[.]']"  # the embedding below it is trained
WAYS = {
    ", recomputed": ["activation_checkpoint=full"],
    ", compiled": ["compile=true"],
    ", recomputed and compiled": ["activation_checkpoint=full", "compile=true"],
}


def make_variants(engine: str, *, world_size: int) -> dict[str, Any]:
    """Return what is run in each way, and what it is compared with, where that is no other test's case."""
    made = {f"{engine}, between": make_case(engine, BETWEEN, world_size=world_size)}
    for way, overrides in WAYS.items():
        if "compiled" in way and not IS_LONG:  # C++ takes its time: 40 seconds, once
            continue
        made[engine + way] = make_case(engine, *overrides, world_size=world_size)
        made[f"{engine}, between{way}"] = make_case(engine, BETWEEN, *overrides, world_size=world_size)
    return made


ON_ONE_VARIANTS = make_variants("single", world_size=1)
ON_TWO_VARIANTS = make_variants("fsdp", world_size=2) | (make_variants("ZeRO-2", world_size=2) if IS_LONG else {})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {name: make_case(name, world_size=2) for name in ON_TWO} | ON_TWO_VARIANTS
    found: dict[str, Any] = run_on_ranks(cases, world_size=2, folder=tmp_path_factory.mktemp("frozen"), worker=WORKER)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of one device."""
    cases = {"single": make_case("single", world_size=1)} | ON_ONE_VARIANTS
    if IS_LONG:
        cases["single, 4 layers"] = make_case("single", "model.num_layers=4", world_size=1)
    found: dict[str, Any] = run_on_ranks(cases, world_size=1, folder=tmp_path_factory.mktemp("alone"), worker=WORKER)
    return found


@pytest.mark.parametrize("name", ON_TWO)
def test_a_frozen_half_trains_resumes_and_stays_as_it_was(name: str, results: dict[str, Any], alone: Any) -> None:
    result = results[name]
    assert "error" not in result, result["error"]
    difference = largest_difference(result["rows"], alone["single, 4 layers" if "bubble" in name else "single"]["rows"])
    assert difference["train/loss"] < 1e-5  # float32: other orders of the same sums
    assert difference["grad/norm"] < 1e-5
    assert_resumed(result)
    assert not [key for key in result["changed"] if key.startswith(FROZEN)]
    assert {key.partition(".")[0] for key in result["changed"]} == TRAINED


def assert_resumed(result: dict[str, Any]) -> None:
    """Assert that a run goes on as it was, and that what has changed is what has optimizer state."""
    for key in ("train/loss", "grad/norm", "val/loss", "lr/layer_2_decay"):
        assert result["rows"][-1][key] == result["resumed"][-1][key], key
    assert result["changed"] == result["with_state"]


@pytest.mark.parametrize("name", [*ON_ONE_VARIANTS, *ON_TWO_VARIANTS])
def test_recomputed_and_compiled_blocks_keep_the_curve_and_every_frozen_bit(
    name: str, results: dict[str, Any], alone: dict[str, Any]
) -> None:
    found = results | alone
    engine = name.partition(",")[0]
    result, plain = found[name], found[f"{engine}, between" if "between" in name else engine]
    for each in (result, plain):
        assert "error" not in each, each["error"]
    if "compiled" in name:
        differences = largest_difference(result["rows"], plain["rows"])
        assert max(differences.values()) < 1e-5, differences  # fused kernels round the same formulas in another order
        assert result["num_graphs"] > 0
    else:
        assert [_numbers(row) for row in result["rows"]] == [_numbers(row) for row in plain["rows"]]
        # two micro-batches in each of four steps; what lies below the first trained weight has no backward pass
        again = [calls - once for calls, once in zip(result["calls"], plain["calls"], strict=True)]
        assert again == ([8 if "between" in name else 0, 8] if "recomputed" in name else [0, 0])
    assert_resumed(result)
    assert not [key for key in result["changed"] if key.startswith("blocks.0.")]
    below = {"embedding", "position"} if "between" in name else set()
    assert {key.partition(".")[0] for key in result["changed"]} == TRAINED | below


def _numbers(row: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key.startswith(("train/loss", "grad/", "val/"))}


def test_learning_rates_of_groups_are_logged_and_the_first_is_that_of_the_config(alone: Any) -> None:
    row = alone["single"]["rows"][-1]
    # step 4 of a warm-up of 5; the head, then the second of two blocks
    assert row["lr"] == row["lr/layer_3_decay"] == pytest.approx(8e-4)
    assert row["lr/layer_2_decay"] == row["lr/layer_2_mlp_decay"] == pytest.approx(6e-4)


def test_a_frozen_stage_trains_nothing_on_its_rank(results: dict[str, Any]) -> None:
    assert results["pp2"]["trained_here"] == []  # of rank 0
    assert results["fsdp"]["trained_here"]
    assert not any(key.startswith(FROZEN) for key in results["fsdp"]["trained_here"])
