"""What ranks send, against the formulas of ring collectives."""

import pytest

from recipes.mesh import Mesh
from recipes.plan.communication import Traffic, of_model_ranks, of_partitions, of_replicas, of_shards
from recipes.plan.hardware import Cluster, find_cluster
from recipes.plan.memory import Zero
from recipes.plan.roofline import Seconds, StepSeconds
from recipes.plan.trace import Cost, Op

GRADIENTS = 4e9  # bytes of 1e9 parameters


def _cluster(num_nodes: int = 1) -> Cluster:
    return find_cluster("h100x8", per_node=None, num_nodes=num_nodes, interconnect=None, memory_gib=None)


def test_an_all_reduce_sends_the_gradients_almost_twice() -> None:
    sent = of_replicas(_cluster(), num_ranks=8, gradient_bytes=GRADIENTS, backward_seconds=10.0)
    assert sent.num_bytes == 2 * 7 / 8 * GRADIENTS
    # 153 buckets of 25 MiB, each through 7 hops and back
    assert sent.seconds == pytest.approx(sent.num_bytes / (450e9 * 0.75) + GRADIENTS / (25 * 2**20) * 14 * 3.4e-6)


def test_all_of_it_hides_behind_a_long_backward_pass_but_the_last_bucket() -> None:
    sent = of_replicas(_cluster(), num_ranks=8, gradient_bytes=GRADIENTS, backward_seconds=10.0)
    assert sent.exposed_seconds == pytest.approx(2 * 25 * 2**20 / (450e9 * 0.75) + 14 * 3.4e-6)


def test_what_the_backward_pass_cannot_hide_is_waited_for() -> None:
    hidden = of_replicas(_cluster(2), num_ranks=16, gradient_bytes=GRADIENTS, backward_seconds=0.01)
    assert hidden.exposed_seconds == pytest.approx(hidden.seconds - 0.01)


def test_what_an_optimizer_sends_is_waited_for() -> None:
    def plan(ops: list[Op]) -> Traffic:
        return of_replicas(_cluster(), num_ranks=8, gradient_bytes=GRADIENTS, backward_seconds=10.0, ops=ops)

    cost = Cost("collective", num_bytes=1e9)
    result = Op(name="c10d::broadcast_", section="optimizer", cost=cost, allocated={}, freed={})
    without, found = plan([]), plan([result, result])
    seconds = 2 * (1e9 / (450e9 * 0.75) + _cluster().latency_between(8))
    assert found.num_bytes - without.num_bytes == 2e9
    assert found.seconds - without.seconds == pytest.approx(seconds)
    assert found.exposed_seconds - without.exposed_seconds == pytest.approx(seconds)


def test_one_rank_sends_nothing() -> None:
    assert of_replicas(_cluster(), num_ranks=1, gradient_bytes=GRADIENTS, backward_seconds=1.0).num_bytes == 0


@pytest.mark.parametrize(("stage", "times"), [(1, 2), (2, 5), (3, 8)])
def test_zero_sends_gradients_to_their_owners_and_weights_back(stage: int, times: int) -> None:
    """Four micro-batches: stage 1 reduces once, stage 2 each time, stage 3 gathers each time as well."""
    zero = Zero(
        stage=stage,  # type: ignore[arg-type]
        num_ranks=8,
        bucket=1024,
        num_buckets=1,
        offloads_optimizer=False,
        offloads_weights=False,
        is_half=False,
    )
    step = StepSeconds(sections={"forward/a": Seconds(matmul=1.0), "backward/a": Seconds(matmul=2.0)})
    sent = of_partitions(
        zero, step, _cluster(), num_parameters=10**9, num_trained=10**9, num_micro_batches=4, gathers_once=True
    )
    assert sent.num_bytes == pytest.approx(times * 4e9 * 7 / 8)


def test_a_ring_takes_longer_with_every_rank_and_a_tree_with_every_doubling() -> None:
    """128 nodes of 8: 896 hops within them and 127 between; up and down a tree 7 hops within and 7 between."""
    cluster = _cluster(128)
    assert cluster.latency_between(8) == pytest.approx(7 * 3.4e-6)
    assert cluster.latency_between(1024) == pytest.approx(896 * 3.4e-6 + 127 * 14e-6)
    assert cluster.reduction_latency(1024) == pytest.approx(2 * (7 * 3.4e-6 + 7 * 14e-6))
    assert cluster.latency_between(1) == cluster.reduction_latency(1) == 0.0


def _collective(name: str, dimension: str, section: str, *, num_bytes: float = 1e9) -> Op:
    cost = Cost("collective", num_bytes=num_bytes)
    return Op(name=name, section=section, cost=cost, allocated={}, freed={}, dimension=dimension)


STEP = StepSeconds(sections={"forward/block 0": Seconds(matmul=1.0), "backward/block 0": Seconds(matmul=2.0)})


def test_matrices_send_within_the_node_and_nothing_hides_it() -> None:
    ops = [
        _collective("_c10d_functional::all_gather_into_tensor", "tensor", "forward/block 0"),
        _collective("_c10d_functional::all_reduce", "tensor", "backward/block 0"),
        _collective("_c10d_functional::all_to_all_single", "context", "forward/block 0"),
        _collective("c10d::_allgather_base_", "shard", "forward/block 0"),
    ]
    tensor, context = of_model_ranks(ops, _cluster(2), Mesh(shard=2, context=2, tensor=4), num_micro_batches=3)
    assert (tensor.dimension, tensor.num_ranks, context.dimension, context.num_ranks) == ("tensor", 4, "context", 2)
    assert tensor.num_bytes == pytest.approx(3 * (3 / 4 + 2 * 3 / 4) * 1e9)
    latency = _cluster().latency_between(4) + _cluster().reduction_latency(4)
    assert tensor.seconds == pytest.approx(tensor.num_bytes / (450e9 * 0.75) + 3 * latency)
    assert context.num_bytes == pytest.approx(3 * 1e9 / 2)
    assert context.seconds == pytest.approx(context.num_bytes / (450e9 * 0.75) + 3 * 3.4e-6)
    assert tensor.exposed_seconds == tensor.seconds


def test_experts_send_rows_that_nothing_hides_and_their_shards_gather_what_ranks_with_the_same_experts_have() -> None:
    """Eight ranks of two nodes with four experts each way: those with the same are four apart, one link away."""
    ops = [
        _collective("c10d::_allgather_base_", "expert_shard", "forward/block 0"),
        _collective("_c10d_functional::all_to_all_single", "expert", "forward/block 0"),
    ]
    mesh = Mesh(shard=16, expert=4)
    [expert] = of_model_ranks(ops, _cluster(2), mesh, num_micro_batches=3)
    assert (expert.dimension, expert.num_ranks) == ("expert", 4)
    assert expert.num_bytes == pytest.approx(3 * 3 / 4 * 1e9)
    assert expert.exposed_seconds == expert.seconds
    [_, shards] = of_shards(ops, STEP, _cluster(2), mesh, num_micro_batches=3)
    assert (shards.dimension, shards.num_ranks) == ("expert_shard", 4)
    assert shards.num_bytes == pytest.approx(3 * 3 / 4 * 1e9)


def test_both_kinds_of_shards_hide_behind_the_same_computation() -> None:
    """A second of products before the backward pass; half a second is left for what comes second."""
    needed = 1e9
    one = of_shards(
        [_collective("c10d::_allgather_base_", "shard", "backward/block 0", num_bytes=needed)],
        STEP,
        _cluster(2),
        Mesh(shard=16),
        num_micro_batches=1,
    )[0]
    num_bytes = needed * 0.75 / one.seconds  # three quarters of a second
    sent = [
        _collective("c10d::_allgather_base_", name, "backward/block 0", num_bytes=num_bytes)
        for name in ("shard", "expert_shard")
    ]
    shard, experts = of_shards(sent, STEP, _cluster(2), Mesh(shard=16, expert=2), num_micro_batches=1)
    assert shard.exposed_seconds == 0
    assert experts.exposed_seconds == pytest.approx(experts.seconds - (1 - shard.seconds), rel=1e-6)


def test_shards_are_those_of_samples_and_sequences_and_replicas_send_what_is_left() -> None:
    """Eight shards, four ranks apart: two in a node, whose eight links they share with three other groups."""
    ops = [
        _collective("c10d::_allgather_base_", "shard", "forward/block 0"),
        _collective("c10d::_reduce_scatter_base_", "shard", "backward/block 0"),
        _collective("c10d::allreduce_", "replicate", "backward/block 0", num_bytes=1e8),
        _collective("_c10d_functional::all_reduce", "tensor", "backward/block 0"),
    ]
    mesh = Mesh(replicate=2, shard=4, context=2, tensor=4)
    shard, replicate = of_shards(ops, STEP, _cluster(8), mesh, num_micro_batches=3)
    assert (shard.num_ranks, replicate.num_ranks) == (8, 2)
    assert shard.num_bytes == pytest.approx(3 * 2 * 7 / 8 * 1e9)
    assert replicate.num_bytes == pytest.approx(3 * 1e8)
    assert shard.seconds == pytest.approx(shard.num_bytes / (2 * 50e9 * 0.75) + 6 * (4 * 3.4e-6 + 3 * 14e-6))
    assert replicate.seconds == pytest.approx(replicate.num_bytes / (50e9 * 0.75) + 3 * 2 * 14e-6)
    once = of_shards(ops, STEP, _cluster(8), mesh, num_micro_batches=3, syncs_each_micro_batch=False)
    assert once[0].num_bytes == pytest.approx((3 + 1) * 7 / 8 * 1e9)
    assert once[1].num_bytes == pytest.approx(1e8)
