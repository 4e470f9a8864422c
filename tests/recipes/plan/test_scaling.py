"""A run on more and more ranks: where a strategy stops scaling, and what the arithmetic says of 64 ranks."""

from itertools import pairwise

from recipes.config import compose_and_check
from recipes.plan.hardware import find_cluster
from recipes.plan.roofline import get_rates
from recipes.plan.scaling import ScalePoint, describe_scaling, find_limit, plan_scaling

RATES = get_rates("NVIDIA H100 80GB HBM3", tflops={"bf16": 989.4, "fp16": 989.4, "fp32": 67.0}, bandwidth=3350e9)
OVERRIDES = [
    "mode=plan", "recipe=fsdp_bf16", "model=gpt2", "data=random_tokens", "model.num_layers=2", "global_batch_size=128",
    "micro_batch_size=2", "trainer.devices=8",
]  # fmt: skip


def point(ranks: int, speed: float, *, fits: bool = True) -> ScalePoint:
    return ScalePoint(num_ranks=ranks, peak_bytes=1, fits=fits, samples_per_second=speed, exposed_fraction=0.0)


def test_scaling_ends_where_twice_the_ranks_bring_less_than_half_of_what_they_could() -> None:
    assert find_limit([point(8, 100), point(16, 190), point(32, 280), point(64, 500)]) == 16
    assert find_limit([point(8, 100), point(16, 151)]) is None
    assert find_limit([point(8, 100, fits=False), point(16, 100)]) is None


def test_every_strategy_is_planned_on_1_2_and_4_nodes_at_the_same_global_batch() -> None:
    composed, mistakes = compose_and_check(OVERRIDES)
    assert composed is not None, mistakes
    cluster = find_cluster("h100x8", per_node=8, num_nodes=1, interconnect=None, memory_gib=None)
    curves = dict(plan_scaling(composed, cluster, RATES, max_ranks=32))
    assert list(curves) == ["ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "fsdp", "hsdp"]
    for strategy, points in curves.items():
        assert [each.num_ranks for each in points] == [8, 16, 32], strategy
        # a little more than twice where a single micro-batch is left, which adds to no gradients
        pairs = pairwise(each.samples_per_second for each in points)
        assert all(after <= 2.1 * before for before, after in pairs), strategy
    memory = {strategy: [each.peak_bytes for each in points] for strategy, points in curves.items()}
    assert memory["ddp"][0] == memory["ddp"][2], "replicas hold the same however many they are"
    assert memory["fsdp"][0] > memory["fsdp"][1] > memory["fsdp"][2], "shards become smaller"
    assert memory["hsdp"][0] == memory["hsdp"][2], "shards of one node stay"
    lines = list(describe_scaling(curves, seq_len=1024, steps=1000, batch=128, price=2.0))
    assert lines[0] == "scaling at 128 samples per step:"
    first = curves["ddp"][0]
    hours = 1000 * 128 / first.samples_per_second / 3600
    assert f"{first.samples_per_second * 1024:,.0f}" in lines[2]
    assert f"{hours:,.1f}" in lines[2]


def test_a_batch_that_does_not_divide_ends_the_curve() -> None:
    composed, _ = compose_and_check([*OVERRIDES, "global_batch_size=24", "micro_batch_size=1"])
    assert composed is not None
    cluster = find_cluster("h100x8", per_node=8, num_nodes=1, interconnect=None, memory_gib=None)
    curves = dict(plan_scaling(composed, cluster, RATES, max_ranks=64))
    assert [each.num_ranks for each in curves["ddp"]] == [8]
