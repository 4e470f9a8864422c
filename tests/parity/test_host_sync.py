"""On two ranks, between logged steps: what the host reads, and that no engine breaks a block's graph."""

from pathlib import Path
from typing import Any

import pytest
from cases import DECODER, IS_LONG
from ranks import run_on_ranks

WORKER = Path(__file__).parent / "host_sync_ranks.py"
LOG_EVERY = 5
ENGINES = ["ddp", "fsdp", "deepspeed_stage_3", *(["deepspeed_stage_1", "deepspeed_stage_2"] if IS_LONG else [])]
COMPILED = ["ddp, bf16-mixed", "fsdp, activation_checkpoint=selective", "deepspeed_stage_3"]
if IS_LONG:
    COMPILED += ["ddp", "fsdp", "fsdp, bf16-mixed"]
    COMPILED += ["ddp, activation_checkpoint=selective", "fsdp, activation_checkpoint=full"]
# on a GPU neither runs: a fused optimizer reads the flag there, and the reader copies beside the computation
ONLY_ON_A_CPU = {"recipes/strategy/__init__.py: skip_step", "callbacks/loss_spike/reader.py: exchange"}
# DeepSpeed 0.19.8 checks the norm on the host before each update, and the guard decides there whether to skip it
BY_DEEPSPEED = {"deepspeed/runtime/utils.py: is_invalid_grad_norm", "recipes/strategy/deepspeed/strategy.py: _decide"}


def _case(engine: str, *more: str) -> dict[str, Any]:
    overrides = [*DECODER, "model=gpt2_nano", f"strategy={engine}", "trainer.devices=2", "trainer.accelerator=cpu"]
    overrides += ["global_batch_size=8", "micro_batch_size=2", "trainer.max_steps=15", f"log_every={LOG_EVERY}"]
    overrides += ["eval_every=15", "eval_samples=4", "save_every=null", "warmup_steps=1", "~callbacks.report", *more]
    return {"overrides": [*overrides, "~callbacks.sample_text"], "log_every": LOG_EVERY}


def _compiled(name: str) -> dict[str, Any]:
    engine, _, more = name.partition(", ")
    override = f"precision={more}" if more == "bf16-mixed" else more
    return _case(engine, "compile=true", *([override] if override else []))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {engine: _case(engine, "precision=bf16-mixed") for engine in ENGINES}
    cases |= {f"compiled {name}": _compiled(name) for name in COMPILED}
    found = run_on_ranks(cases, world_size=2, folder=tmp_path_factory.mktemp("host_sync"), worker=WORKER)
    for name, result in found.items():
        assert "error" not in result, f"{name}: {result['error']}"
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_between_logged_steps_only_deepspeeds_check_of_the_norm_is_read_on_the_host(
    engine: str, results: dict[str, Any]
) -> None:
    ranks = results[engine]["ranks"]
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["num_logged"] > 4, "the rows are read there: else nothing is counted"
        assert {*rank["places"]} - ONLY_ON_A_CPU == (BY_DEEPSPEED if engine.startswith("deepspeed") else set())


@pytest.mark.parametrize("name", COMPILED)
def test_blocks_share_one_graph_in_training_and_one_in_validation(name: str, results: dict[str, Any]) -> None:
    for rank in results[f"compiled {name}"]["ranks"]:
        assert rank["graph_breaks"] == []
        assert rank["graphs"] == 2
