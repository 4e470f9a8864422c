"""On two ranks, in the middle of training: every engine generates the tokens of the others and trains on as without."""

from pathlib import Path
from typing import Any

import pytest
from cases import DECODER
from plan_cases import cpu_cluster
from ranks import run_on_ranks
from support import composed_config, resolved

from recipes.plan.plan import make_plan

WORKER = Path(__file__).with_name("engine_ranks.py")
NUM_TOKENS = 8  # as the worker generates
ENGINES = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "fsdp per token": ["strategy=fsdp", "strategy.gather_for_generation=per_token"],
    "fsdp bf16": ["strategy=fsdp", "precision=bf16-mixed"],
    "tensor": ["strategy=fsdp", "tensor_parallel_size=2"],
    "pipeline": ["strategy=fsdp", "pipeline_parallel_size=2"],
    "zero 3": ["strategy=deepspeed_stage_3"],
    "zero 3 per token": ["strategy=deepspeed_stage_3", "strategy.gather_for_generation=per_token"],
}
WITHOUT = ("fsdp", "zero 3")  # engines whose runs are repeated without generating


def _case(engine: str, *, generates: bool) -> dict[str, Any]:
    # ZeRO-3 keeps weights of up to 100,000 elements gathered
    wide = [override.replace("hidden_size=32", "hidden_size=192") for override in DECODER]
    overrides = [*wide, "model=gpt2_nano", *ENGINES[engine], "trainer.devices=2", "trainer.accelerator=cpu"]
    overrides += ["global_batch_size=8", "micro_batch_size=2", "trainer.max_steps=4", "log_every=1", "eval_every=4"]
    overrides += ["eval_samples=4", "save_every=null", "warmup_steps=1", "callbacks=[]"]
    return {"overrides": overrides, "generates": generates}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {engine: _case(engine, generates=True) for engine in ENGINES}
    cases |= {f"{engine} without": _case(engine, generates=False) for engine in WITHOUT}
    found = run_on_ranks(cases, world_size=2, folder=tmp_path_factory.mktemp("generation"), worker=WORKER)
    for name, result in found.items():
        assert "error" not in result, f"{name}: {result['error']}"
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "fsdp bf16"])
def test_log_probabilities_are_those_of_a_forward_pass(engine: str, results: dict[str, Any]) -> None:
    for rank in results[engine]["ranks"]:
        assert rank["difference"] < 1e-5  # float32 rounding of other shapes of the same products
        assert rank["tokens"] == results["ddp"]["ranks"][0]["tokens"]


def test_weights_are_gathered_once_per_call_or_for_each_token(results: dict[str, Any]) -> None:
    def count(engine: str) -> int:
        return int(results[engine]["ranks"][0]["gathers"])

    assert count("ddp") == 0
    for engine in ("fsdp", "zero 3"):
        # the last of two blocks and the rest stay gathered in either case
        assert 0 < count(engine) <= count(f"{engine} per token") - (NUM_TOKENS - 1)
        assert results[engine]["ranks"][0]["is_independent"]
        assert not results[f"{engine} per token"]["ranks"][0]["is_independent"]
    for engine in ("tensor", "pipeline"):
        assert not results[engine]["ranks"][0]["is_independent"]


@pytest.mark.parametrize("engine", ["fsdp", "fsdp bf16"])
def test_what_is_gathered_is_what_the_plan_says(engine: str, results: dict[str, Any]) -> None:
    run = resolved(composed_config(*_case(engine, generates=True)["overrides"]))
    planned = make_plan(run, cpu_cluster(2), rates=None).generation
    assert planned is not None
    assert results[engine]["ranks"][0]["gathered_bytes"] == planned.gathered_bytes


@pytest.mark.parametrize("engine", WITHOUT)
def test_training_goes_on_as_if_nothing_had_been_generated(engine: str, results: dict[str, Any]) -> None:
    assert results[engine]["ranks"][0]["loss"] == results[f"{engine} without"]["ranks"][0]["loss"]
