"""Estimate communication per step: bytes, time, and the time not overlapped by computation."""

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.mesh import Mesh
from recipes.plan.hardware import Cluster
from recipes.plan.memory import Zero
from recipes.plan.roofline import StepSeconds
from recipes.plan.trace import Op

_BUCKET_BYTES = 25 * 2**20  # DDP's: the last one has no computation left to hide behind
_FLOAT32 = 4
WAITED_FOR = ("tensor", "context", "expert")  # blocking: the next operator needs the result
_SHARDS = ("shard", "expert_shard")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Traffic of a rank along one mesh dimension in one optimizer step.

    Attributes:
        dimension: Mesh dimension.
        num_ranks: Ranks along the dimension.
        num_bytes: Bytes sent by a rank.
        seconds: Time on otherwise idle links.
        exposed_seconds: Part of `seconds` not overlapped by computation.
    """

    dimension: str = "replicate"
    num_ranks: int = 1
    num_bytes: float = 0.0
    seconds: float = 0.0
    exposed_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Traffic of a rank in one optimizer step, by dimension."""

    traffic: tuple[Traffic, ...] = ()

    @property
    def num_bytes(self) -> float:
        """Bytes sent along all dimensions."""
        return sum(part.num_bytes for part in self.traffic)

    @property
    def seconds(self) -> float:
        """Total time if dimensions did not share links."""
        return sum(part.seconds for part in self.traffic)

    @property
    def exposed_seconds(self) -> float:
        """Part of the time not overlapped by computation."""
        return sum(part.exposed_seconds for part in self.traffic)


def of_replicas(
    cluster: Cluster, *, num_ranks: int, gradient_bytes: float, backward_seconds: float, ops: Sequence[Op] = ()
) -> Traffic:
    """Return DDP's traffic: one all-reduce of the gradients, bucket by bucket during the last backward pass.

    An optimizer that distributes its work also sends its results, without overlap.

    Args:
        cluster: The devices.
        num_ranks: Ranks that average gradients.
        gradient_bytes: Gradient bytes of the model.
        backward_seconds: Backward time of the last micro-batch.
        ops: Operators of one step; collectives over all ranks belong to the optimizer.
    """
    if num_ranks == 1:
        return Traffic()
    sent = 2 * (num_ranks - 1) / num_ranks * gradient_bytes
    bandwidth, latency = cluster.bandwidth_between(num_ranks), cluster.reduction_latency(num_ranks)
    last = 2 * min(_BUCKET_BYTES, gradient_bytes) / bandwidth + latency
    seconds = sent / bandwidth + max(gradient_bytes / _BUCKET_BYTES, 1.0) * latency
    exposed = min(seconds, max(seconds - backward_seconds, last))
    results = [op.cost.num_bytes for op in ops if op.cost.kind == "collective" and not op.dimension]
    sharing = sum(results) / bandwidth + len(results) * cluster.latency_between(num_ranks)
    return Traffic(
        num_ranks=num_ranks,
        num_bytes=sent + sum(results),
        seconds=seconds + sharing,
        exposed_seconds=exposed + sharing,
    )


def of_shards(
    ops: Sequence[Op],
    step: StepSeconds,
    cluster: Cluster,
    mesh: Mesh,
    *,
    num_micro_batches: int,
    syncs_each_micro_batch: bool = True,
) -> list[Traffic]:
    """Return FSDP2's traffic from the recorded collectives.

    FSDP2 overlaps communication with the neighboring block's computation: it prefetches weights, and reduces gradients
    of a block while the next one computes. Replicas then all-reduce the reduced shards.

    Args:
        ops: Operators of one step.
        step: Time per section.
        cluster: The devices.
        mesh: Mesh of the ranks.
        num_micro_batches: Micro-batches per optimizer step.
        syncs_each_micro_batch: Whether gradients are reduced after each micro-batch, not once per step.
    """
    sizes, strides = measure_shards(mesh)
    num_reductions = num_micro_batches if syncs_each_micro_batch else 1
    needed = {name: dict.fromkeys(step.sections, (0.0, 0.0)) for name in sizes}  # seconds per step, per call
    total = dict.fromkeys(sizes, 0.0)
    for op in ops:
        if op.cost.kind != "collective" or op.dimension not in sizes:
            continue
        name = op.dimension
        sent, seconds = cost_of_collective(op, cluster, num_ranks=sizes[name], stride=strides[name])
        repeats = (num_micro_batches if "gather" in op.name else num_reductions) if "/" in op.section else 1
        total[name] += sent * repeats
        of_step, at_once = needed[name].get(op.section, (0.0, 0.0))
        needed[name][op.section] = (of_step + seconds * repeats, at_once + seconds)
    late = dict.fromkeys(_SHARDS, 0.0)
    hidden_behind = 0.0
    for section, part in step.sections.items():
        for name in _SHARDS:  # sequentially, overlapped by the same computation
            of_step, at_once = needed[name].get(section, (0.0, 0.0))
            if at_once:
                late[name] += max(at_once - hidden_behind, 0.0) * of_step / at_once
            hidden_behind = max(hidden_behind - at_once, 0.0)
        hidden_behind = part.total
    result = []
    for name, num_ranks in sizes.items():
        exposed = late.get(name, 0.0)
        seconds, at_a_time = (sum(part) for part in zip(*needed[name].values(), strict=True))
        if at_a_time and name == "replicate":  # delayed communication may catch up during later blocks
            exposed = max(at_a_time - step.of("backward/").total, 0.0) * seconds / at_a_time
        if num_ranks > 1 and (name != "expert_shard" or mesh.expert > 1):
            traffic = Traffic(
                dimension=name, num_ranks=num_ranks, num_bytes=total[name], seconds=seconds, exposed_seconds=exposed
            )
            result.append(traffic)
    return result


def measure_shards(mesh: Mesh) -> tuple[dict[str, int], dict[str, int]]:
    """Return sizes and strides of the mesh dimensions that shard or replicate."""
    sizes = {"shard": mesh.shard * mesh.context, "expert_shard": mesh.expert_shard, "replicate": mesh.replicate}
    return sizes, {"shard": mesh.tensor, "expert_shard": mesh.expert, "replicate": mesh.tensor * sizes["shard"]}


def of_model_ranks(ops: Sequence[Op], cluster: Cluster, mesh: Mesh, *, num_micro_batches: int) -> list[Traffic]:
    """Return tensor-, context- and expert-parallel traffic from the recorded collectives.

    None of it overlaps: the next operator needs the result.

    Args:
        ops: Operators of one step.
        cluster: The devices.
        mesh: Mesh of the ranks.
        num_micro_batches: Micro-batches per optimizer step.
    """
    result = []
    for name in WAITED_FOR:
        num_ranks = getattr(mesh, name)
        if num_ranks == 1:
            continue
        total = seconds = 0.0
        stride = mesh.tensor if name == "context" else 1
        for op in ops:
            if op.cost.kind == "collective" and op.dimension == name:
                repeats = num_micro_batches if "/" in op.section else 1
                sent, took = cost_of_collective(op, cluster, num_ranks=num_ranks, stride=stride)
                total, seconds = total + sent * repeats, seconds + took * repeats
        traffic = Traffic(
            dimension=name, num_ranks=num_ranks, num_bytes=total, seconds=seconds, exposed_seconds=seconds
        )
        result.append(traffic)
    return result


def cost_of_collective(op: Op, cluster: Cluster, *, num_ranks: int, stride: int) -> tuple[float, float]:
    """Return bytes sent by a rank and seconds of a recorded collective, as a ring or as direct sends.

    Args:
        op: Collective; its bytes are those of the larger side (gathered output or reduced input).
        cluster: The devices.
        num_ranks: Participating ranks.
        stride: Distance between consecutive ranks.
    """
    if num_ranks == 1:
        return 0.0, 0.0
    is_sum = "all_reduce" in op.name or "allreduce" in op.name
    sent = (2 if is_sum else 1) * (num_ranks - 1) / num_ranks * op.cost.num_bytes
    latency = cluster.reduction_latency if is_sum else cluster.latency_between
    seconds = sent / cluster.bandwidth_between(num_ranks, stride=stride) + latency(num_ranks, stride=stride)
    return sent, seconds


def of_partitions(
    zero: Zero,
    step: StepSeconds,
    cluster: Cluster,
    *,
    num_parameters: int,
    num_trained: int,
    num_micro_batches: int,
    gathers_once: bool,
) -> Traffic:
    """Return ZeRO's traffic: reduce gradients to their owners, then gather weights.

    Args:
        zero: Stage and ranks.
        step: Seconds of the sections.
        cluster: The devices.
        num_parameters: Parameters of the unsharded model.
        num_trained: Those that are trained.
        num_micro_batches: Micro-batches per optimizer step.
        gathers_once: At stage 3, whether gathered weights are kept until the backward pass.
    """
    if zero.num_ranks == 1:
        return Traffic(dimension="shard")
    size = num_trained * (2 if zero.is_half else _FLOAT32) * (zero.num_ranks - 1) / zero.num_ranks  # of gradients
    bandwidth, latency = cluster.bandwidth_between(zero.num_ranks), cluster.latency_between(zero.num_ranks)
    forward, backward = step.of("forward/").total, step.of("backward/").total
    if zero.stage == 3:
        weights = size * num_parameters / num_trained * (1 - zero.num_cast / (2 * num_parameters))
        gathered_again = 0.0 if gathers_once else weights
        sent = (weights + gathered_again + size) * num_micro_batches
        exposed = max(weights / bandwidth - forward, 0.0)
        exposed += max((gathered_again + size) / bandwidth - backward, 0.0)
        exposed *= num_micro_batches
    else:
        reductions = 1 if zero.stage == 1 else num_micro_batches
        sent = size * (reductions + 1)
        exposed = max(size / bandwidth - backward, 0.0) * reductions + size / bandwidth  # the weights come back after
    # one collective per bucket; they run sequentially, so their latencies add up
    waited = sent / (zero.bucket * (2 if zero.is_half else _FLOAT32)) * latency
    return Traffic(
        dimension="shard",
        num_ranks=zero.num_ranks,
        num_bytes=sent,
        seconds=sent / bandwidth + waited,
        exposed_seconds=exposed + waited,
    )
