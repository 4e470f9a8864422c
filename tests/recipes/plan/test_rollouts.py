"""What rollouts take in a plan: keys and values of all rows, the weights once a token, a frozen copy."""

import json
from pathlib import Path

import pytest
import torch
from support import composed_config, resolved

from recipes.generation.window import Window
from recipes.plan.hardware import find_cluster
from recipes.plan.measured import OperatorTimer
from recipes.plan.plan import make_plan
from recipes.plan.rollouts import RolloutCost, describe_rollouts, plan_rollouts
from recipes.plan.roofline import Rates, get_rates

RUN = (
    *("recipe=grpo", f"data.path={__file__}", "reward=exact_match", "tokenizer=bytes", "model=gpt2_nano"),
    *("model.vocab_size=257", "model.max_seq_len=32", "rollout.max_new_tokens=8", "global_batch_size=128"),
)
ON_H100: Rates = get_rates("NVIDIA H100 80GB HBM3", tflops={"fp32": 67.0, "bf16": 989.0}, bandwidth=3.35e12)


def cost_of(
    *overrides: str, rates: Rates | OperatorTimer | None = ON_H100, memory_gib: float | None = None
) -> RolloutCost | None:
    run = resolved(composed_config(*RUN, *overrides), Path("unused"))
    cluster = find_cluster("h100x8", per_node=1, num_nodes=1, interconnect=None, memory_gib=memory_gib)
    planned = make_plan(run, cluster, rates=rates if isinstance(rates, Rates) else None)  # timing a step takes long
    return plan_rollouts(run, planned, rates=rates)


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
    # at least the weights for each of 8 tokens, and the launches of all kernels
    assert cost.seconds > 8 * 1_402_560 * 4 / (3.35e12 * 0.8)
    assert cost.seconds > 8 * 4 * 9e-6


def test_a_step_has_shares_of_its_rollout_its_log_probabilities_and_its_training() -> None:
    once, again = cost_of(), cost_of("loss.beta=0.04", "rollout.num_iterations=2")
    assert once is not None
    assert again is not None
    assert once.again_seconds == 0.0, "one iteration without a reference looks at no token twice"
    for cost in (once, again):
        assert cost.shares is not None
        assert sum(cost.shares.values()) == pytest.approx(1.0)
    of_one, of_two = once.shares or {}, again.shares or {}
    assert of_two["log-probabilities"] > 0.0 == of_one["log-probabilities"]
    assert of_two["training"] / of_two["rollout"] == pytest.approx(2 * of_one["training"] / of_one["rollout"], rel=0.2)
    assert any("training" in line and "mode=preflight times them" in line for line in describe_rollouts(once))


def test_the_cache_of_a_model_of_transformers_holds_its_key_value_heads_and_no_more_than_a_sliding_window(
    tmp_path: Path,
) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 257,
        "max_position_embeddings": 64,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    overrides = ("model=huggingface", f"model.name={tmp_path}", "model.pretrained=null", "model.max_seq_len=32")
    cost = cost_of(*overrides)
    assert cost is not None
    of_token = 2 * 2 * 8  # keys and values, two heads of 8
    assert cost.cache_bytes == 128 * of_token * (3 * 32 + 8) * 4


def test_the_cache_is_that_of_a_real_rollout_and_its_tokens_are_timed_on_this_machine() -> None:
    cost = cost_of("model=llama_nano", "global_batch_size=16", rates=OperatorTimer(torch.device("cpu")))
    assert cost is not None
    run = resolved(composed_config(*RUN, "model=llama_nano"), Path("unused"))
    window = Window(run.make_model(), [[1] * 24] * 16, num_tokens=8, slides=False, use_cache=True, images=None)
    with torch.no_grad():
        window.start()
    assert cost.cache_bytes == window._cache.num_values * 4
    assert cost.seconds is not None
    assert 0.0 < cost.seconds < 60.0, "of 8 tokens"


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
