"""A layout that was estimated from a few recordings needs what it needs when it is recorded itself."""

from dataclasses import replace
from typing import Any

import pytest
from support import composed_config, resolved

from recipes.config import compose_and_check
from recipes.mesh import Mesh
from recipes.plan.estimate import Estimator, Layout, _interpolate
from recipes.plan.hardware import find_cluster
from recipes.plan.pipeline import Pipeline
from recipes.plan.plan import make_plan
from recipes.plan.roofline import get_rates
from recipes.plan.search import _prepare

RATES = get_rates("NVIDIA H100 80GB HBM3", tflops={"bf16": 989.4, "fp16": 989.4, "fp32": 67.0}, bandwidth=3350e9)
RUN = [
    *("mode=plan", "data=random_tokens", "recipe=fsdp_bf16", "model=llama_8b", "model.num_layers=12", "seq_len=4096"),
    *("model.max_seq_len=4096", "model.hidden_size=2048", "model.num_heads=16", "model.ffn_hidden_size=5632"),
    *("model.vocab_size=32000", "compile=true", "global_batch_size=128"),
]
CLUSTER = find_cluster("h100x16", per_node=None, num_nodes=1, interconnect=None, memory_gib=None)


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    composed, mistakes = compose_and_check(RUN)
    assert composed is not None, mistakes
    prepared = _prepare(composed, CLUSTER, RATES, "none")
    assert prepared is not None
    return prepared[2]


@pytest.mark.parametrize(
    ("mesh", "num_stages", "micro_batch_size"),
    [
        (Mesh(shard=16), 1, 2),
        (Mesh(shard=4, tensor=4), 1, 8),
        (Mesh(shard=4, context=4), 1, 4),
        (Mesh(replicate=2, shard=2, context=2, tensor=2), 1, 1),
        (Mesh(shard=4, tensor=2), 2, 2),
    ],
    ids=["shards", "tensor", "context", "all of them", "pipeline"],
)
def test_an_estimate_is_near_the_recorded_step(
    estimator: Estimator, mesh: Mesh, num_stages: int, micro_batch_size: int
) -> None:
    settings: dict[str, Any] = {
        "tensor_parallel_size": mesh.tensor,
        "context_parallel_size": mesh.context,
        "pipeline_parallel_size": num_stages,
        "data_parallel_shard": mesh.shard,
        "micro_batch_size": micro_batch_size,
    }
    plan = make_plan(resolved(composed_config(*RUN) | settings), CLUSTER, rates=RATES)
    assert replace(plan.mesh, pipeline=1) == mesh
    layout = Layout(
        mesh=mesh,
        pipeline=Pipeline(num_stages=num_stages),
        micro_batch_size=micro_batch_size,
        num_micro_batches=128 // mesh.data_size // micro_batch_size,
    )
    estimate = estimator.estimate(layout)
    # what a place holds at most is added to what FSDP2 gathers at most: 10 % too much with half a sample on a rank
    assert estimate.peak_bytes == pytest.approx(plan.peak.total, rel=0.12)
    assert plan.times is not None
    assert estimate.step_seconds == pytest.approx(plan.times.step_seconds, rel=0.1)


def test_weights_samples_and_ranks_are_told_apart() -> None:
    """Weights 12, and of a sample 5 on every rank and 8 that they divide: 25, with two samples 38, on two ranks 15."""
    assert _interpolate(25, 38, 15, tensor=1, samples=1) == 25
    assert _interpolate(25, 38, 15, tensor=4, samples=3) == 12 / 4 + 3 * (5 + 8 / 4)
