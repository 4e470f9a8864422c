"""What rollouts take in a plan: keys and values of all rows, the weights once a token, a frozen copy."""

from pathlib import Path

import pytest
from support import composed_config, resolved

from recipes.plan.hardware import find_cluster
from recipes.plan.plan import make_plan
from recipes.plan.rollouts import RolloutCost, describe_rollouts, plan_rollouts
from recipes.plan.roofline import Rates, get_rates

RUN = (
    *("recipe=grpo", f"data.path={__file__}", "reward=exact_match", "tokenizer=bytes", "model=gpt2_nano"),
    *("model.vocab_size=257", "model.max_seq_len=32", "rollout.max_new_tokens=8", "global_batch_size=128"),
)
ON_H100: Rates = get_rates("NVIDIA H100 80GB HBM3", tflops={"fp32": 67.0, "bf16": 989.0}, bandwidth=3.35e12)


def cost_of(*overrides: str, rates: Rates | None = ON_H100, memory_gib: float | None = None) -> RolloutCost | None:
    run = resolved(composed_config(*RUN, *overrides), Path("unused"))
    cluster = find_cluster("h100x8", per_node=1, num_nodes=1, interconnect=None, memory_gib=memory_gib)
    return plan_rollouts(run, make_plan(run, cluster, rates=rates), rates=rates)


def test_the_cache_holds_keys_and_values_of_all_rows_and_layers() -> None:
    cost = cost_of()
    assert cost is not None
    config = composed_config(*RUN)["model"]
    width, layers = config["hidden_size"], config["num_layers"]
    assert cost.cache_bytes == 128 * 32 * layers * 2 * width * 4
    in_parts = cost_of("rollout.rows_at_a_time=32")
    assert in_parts is not None
    assert (in_parts.num_batches, in_parts.cache_bytes) == (4, cost.cache_bytes // 4)
    assert cost.seconds is not None
    # between the weights alone, and the weights with a full cache, for each of 8 tokens
    least = 8 * 1_402_560 * 4 / (3.35e12 * 0.8)
    assert least < cost.seconds < least + 8 * cost.cache_bytes / (3.35e12 * 0.8)


def test_a_frozen_copy_is_part_of_what_stays_while_it_samples() -> None:
    without, tied = cost_of(), cost_of("loss.beta=0.04")
    assert without is not None
    assert tied is not None
    assert (without.reference_bytes, tied.reference_bytes) == (0, pytest.approx(4 * 1_402_560, rel=0.01))
    assert tied.held_bytes - without.held_bytes == tied.reference_bytes
    assert any("a frozen copy" in line for line in describe_rollouts(tied))


def test_a_cache_that_does_not_fit_names_the_setting_that_halves_it_and_an_unknown_time_is_said_to_be() -> None:
    lines = [*describe_rollouts(cost_of(rates=None, memory_gib=0.83))]
    assert lines[0] == "rollout: 128 completions at a time on each rank, of at most 8 tokens, 32 with the prompt"
    assert lines[1].endswith("DOES NOT FIT: rollout.rows_at_a_time=64")
    assert "unknown for this device" in lines[2]


def test_runs_without_rollouts_have_no_row_of_them() -> None:
    assert [*describe_rollouts(None)] == []
