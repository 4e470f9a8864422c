"""A rank of a pipeline on paper: what it keeps gathered, and what ranks with the same layers send each other."""

from typing import Any

import pytest
from support import composed_config, resolved

from recipes.plan.hardware import find_cluster
from recipes.plan.plan import Plan, make_plan
from recipes.plan.roofline import get_rates
from recipes.plan.trace import GATHERED

RATES = get_rates("NVIDIA H100 80GB HBM3", tflops={"bf16": 989.4, "fp16": 989.4, "fp32": 67.0}, bandwidth=3350e9)
CLUSTER = find_cluster("h100x8", per_node=None, num_nodes=1, interconnect=None, memory_gib=None)
RUN = [
    *("mode=plan", "data=random_tokens", "recipe=ep_bf16", "model=mixtral_8x7b", "model.num_layers=4", "seq_len=2048"),
    *("global_batch_size=16", "micro_batch_size=1", "activation_checkpoint=full", "pipeline_parallel_size=2"),
]
EXPERTS = 4 * 3 * 8 * 4096 * 14336  # parameters


@pytest.fixture(scope="module")
def plans() -> dict[int, Plan]:
    """Return plans of four ranks with the same two layers, by how many of them divide the experts."""
    return {
        size: make_plan(resolved(composed_config(*RUN, f"expert_parallel_size={size}")), CLUSTER, rates=RATES)
        for size in (1, 2, 4)
    }


def test_a_rank_keeps_its_own_experts_gathered(plans: dict[int, Plan]) -> None:
    for size, plan in plans.items():
        held = (plan.num_parameters - EXPERTS + EXPERTS / size) / 2  # of two stages
        gathered = max(moment.held.get(GATHERED, 0) for moment in plan.moments)
        assert gathered == pytest.approx(6 * held, rel=0.03)  # bfloat16, and gradients in float32


def _traffic(plan: Plan) -> dict[str, Any]:
    assert plan.times is not None
    return {part.dimension: part for part in plan.times.communication.traffic}


def test_rows_of_experts_are_sent_by_the_layers_of_a_rank(plans: dict[int, Plan]) -> None:
    assert set(_traffic(plans[1])) == {"shard", "pipeline"}
    assert set(_traffic(plans[2])) == {"shard", "expert_shard", "expert", "pipeline"}
    assert set(_traffic(plans[4])) == {"shard", "expert", "pipeline"}
    # two experts each of 2,048 tokens, in bfloat16, there and back, forward, recomputed and backward; the gradient of
    # what entered two matrices of an expert is their sum, in float32
    rows = 2048 * 2 * 4096 * 2 * (2 + 2 + 1 + 2)
    for size in (2, 4):
        sent = _traffic(plans[size])["expert"]
        assert sent.num_bytes == pytest.approx(4 * 2 * rows * (size - 1) / size, rel=0.01)  # micro-batches, layers
        assert sent.exposed_seconds == sent.seconds
