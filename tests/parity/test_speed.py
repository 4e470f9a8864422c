"""Loss and tokens per second of two ranks with four micro-batches each, against an independent clock and sum."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cases import DECODER, IS_LONG, TOKENS
from ranks import run_on_ranks

WORKER = Path(__file__).parent / "speed_ranks.py"
LOG_EVERY, SEQ_LEN, GLOBAL_BATCH_SIZE = 4, 16, 16
# engine -> optimizer steps, and seconds that rank 1 waits in each forward pass
RUNS = {"ddp": (20, 0.13), "fsdp": (12, 0.02), **({"deepspeed_stage_2": (12, 0.02)} if IS_LONG else {})}


def _case(engine: str, *more: str) -> dict[str, Any]:
    steps, wait_seconds = RUNS[engine]
    overrides = [*DECODER, "model=gpt2_nano", f"strategy={engine}", "trainer.devices=2"]
    overrides += ["trainer.accelerator=cpu", f"trainer.max_steps={steps}", f"log_every={LOG_EVERY}"]
    overrides += [f"global_batch_size={GLOBAL_BATCH_SIZE}", "micro_batch_size=2", "save_every=null"]
    overrides += [f"eval_every={steps}", "callbacks=[throughput,bottleneck]", *more]
    return {"overrides": overrides, "data": TOKENS, "wait_seconds": wait_seconds}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("speed")
    cases = {engine: _case(engine) for engine in RUNS}
    every_step = ("log_every=1", "trainer.max_steps=2", "eval_every=2")
    cases |= {f"{engine}, every step": _case(engine, *every_step) for engine in RUNS}
    found = run_on_ranks(cases, world_size=2, folder=folder, worker=WORKER)
    for result in found.values():
        assert "error" not in result, result["error"]
    return found


@pytest.mark.parametrize("engine", RUNS)
def test_tokens_per_second_are_tokens_over_seconds_by_the_clock(engine: str, results: dict[str, Any]) -> None:
    rows, ended = results[engine]["rows"], results[engine]["ended"]
    for before, row in pairwise(rows):
        seconds = ended[str(int(row["step"]))] - ended[str(int(before["step"]))]
        tokens = LOG_EVERY * GLOBAL_BATCH_SIZE * SEQ_LEN
        # the independent clock is read just before
        assert row["throughput/tokens_per_second"] == pytest.approx(tokens / seconds, rel=0.02)
        assert row["throughput/device_tokens_per_second"] == pytest.approx(row["throughput/tokens_per_second"] / 2)
        assert row["time/step_seconds"] == pytest.approx(seconds / LOG_EVERY, rel=0.02)
        assert row["train/tokens"] - before["train/tokens"] == tokens


@pytest.mark.parametrize("engine", RUNS)
def test_flops_count_all_micro_batches_of_all_ranks(engine: str, results: dict[str, Any]) -> None:
    row = results[engine]["rows"][-1]
    per_token = _flops_per_token()
    expected = per_token * row["throughput/tokens_per_second"] / 1e12
    assert row["throughput/total_tflops"] == pytest.approx(expected)
    assert row["throughput/tflops"] == pytest.approx(expected / 2)


def _flops_per_token() -> float:
    """Return 6 N + 12 L d T of the tiny model, from its shapes."""
    hidden_size, layers, vocabulary = 32, 2, 64
    blocks = layers * (12 * hidden_size**2 + 13 * hidden_size)
    parameters = blocks + vocabulary * hidden_size + SEQ_LEN * hidden_size + 2 * hidden_size
    return 6.0 * parameters + 12.0 * layers * hidden_size * SEQ_LEN


@pytest.mark.parametrize("engine", RUNS)
def test_the_loss_is_the_mean_over_every_target_of_both_ranks_and_four_micro_batches(
    engine: str, results: dict[str, Any]
) -> None:
    result = results[f"{engine}, every step"]
    loss_sum, num_targets = result["sums"]
    # float32 sums of 16 samples in another order
    assert result["rows"][0]["train/loss"] == pytest.approx(loss_sum / num_targets, rel=1e-6)


def test_only_the_slow_rank_is_named(results: dict[str, Any]) -> None:
    events = [json.loads(line) for line in results["ddp"]["events"].splitlines()]
    findings = [event for event in events if event["event"] == "diagnosis"]
    assert "slow_rank" in [event["kind"] for event in findings]
    [slow] = [event for event in findings if event["kind"] == "slow_rank"]
    assert slow["text"].startswith("rank 1's forward pass takes ")
    for engine in RUNS.keys() - {"ddp"}:
        assert "slow_rank" not in results[engine]["events"]
