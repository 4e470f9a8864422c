"""What a pipeline does to a plan: less state and work on a rank, more activations, and what stages send."""

from typing import Any

import pytest
from support import composed_config, resolved

from recipes.plan.hardware import find_cluster
from recipes.plan.plan import Plan, make_plan
from recipes.plan.roofline import get_rates
from recipes.plan.trace import ACTIVATIONS, GATHERED

RATES = get_rates("NVIDIA H100 80GB HBM3", tflops={"bf16": 989.4, "fp16": 989.4, "fp32": 67.0}, bandwidth=3350e9)
RUN = ["mode=plan", "data=random_tokens", "recipe=fsdp_bf16", "model=gpt2", "model.num_layers=16", "compile=false"]
RUN += ["model.vocab_size=1024"]  # else the head takes as long as five blocks


def _plan(hardware: str = "h100x8", *, batch: int = 64, **settings: Any) -> Plan:
    cluster = find_cluster(hardware, per_node=None, num_nodes=1, interconnect=None, memory_gib=None)
    config = composed_config(*RUN, f"global_batch_size={batch}", "micro_batch_size=1")
    return make_plan(resolved(config | settings), cluster, rates=RATES)


@pytest.fixture(scope="module")
def whole() -> Plan:
    return _plan()


def _most(plan: Plan, name: str) -> int:
    return max(moment.held.get(name, 0) for moment in plan.moments)


def test_a_stage_has_its_share_of_the_state_and_the_activations_of_all_that_is_in_flight(whole: Plan) -> None:
    plan = _plan(pipeline_parallel_size=4)
    assert plan.num_ranks == 8
    assert plan.mesh.sizes() == {"shard": 2}
    assert plan.accumulation.num_micro_batches == 32
    # four micro-batches in flight of a quarter of the blocks, without what the head keeps
    assert _most(plan, ACTIVATIONS) == pytest.approx(_most(whole, ACTIVATIONS), rel=0.1)
    assert _most(plan, "weights") == pytest.approx(_most(whole, "weights"), rel=0.05)  # of a quarter, on 2 ranks, not 8
    assert _most(plan, GATHERED) == pytest.approx((2 + 4) * plan.num_parameters / 4, rel=0.05)  # bfloat16, float32


def test_the_time_of_a_step_is_that_of_the_slowest_stage_and_its_bubble() -> None:
    few, many = _bubble(pipeline_parallel_size=4), _bubble(batch=1024, pipeline_parallel_size=4)
    assert few == pytest.approx(3 / 35, rel=0.15)  # less what is exposed
    assert many == pytest.approx(3 / 515, rel=0.15)
    assert _bubble(pipeline_parallel_size=4, pipeline_schedule="Interleaved1F1B") < 0.6 * few


def _bubble(**settings: Any) -> float:
    times = _plan(**settings).times
    assert times is not None
    assert times.bubble is not None
    return times.bubble


def test_stages_send_hidden_states_one_way_and_gradients_the_other() -> None:
    plan = _plan(pipeline_parallel_size=2)
    assert plan.times is not None
    traffic = {part.dimension: part for part in plan.times.communication.traffic}
    assert set(traffic) == {"shard", "pipeline"}
    assert traffic["pipeline"].num_bytes == 2 * 16 * 1024 * 768 * 4  # both ways, micro-batches, tokens, channels
    assert traffic["shard"].num_ranks == 4


def test_stages_are_the_outermost_dimension() -> None:
    """Two nodes: each is a stage, whose shards send within it."""
    plan = _plan("h100x16", pipeline_parallel_size=2)
    assert plan.times is not None
    traffic = {part.dimension: part for part in plan.times.communication.traffic}
    assert traffic["pipeline"].num_bytes / traffic["pipeline"].seconds < 50e9
    assert traffic["shard"].num_ranks == 8
