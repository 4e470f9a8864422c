"""What ranks send each other in a step, how long it takes, and how much of that the computation hides."""

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.plan.hardware import Cluster
from recipes.plan.memory import Zero
from recipes.plan.roofline import StepSeconds
from recipes.plan.step import Sharding
from recipes.plan.trace import Op

_BUCKET_BYTES = 25 * 2**20  # DDP's: the last one has no computation left to hide behind
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Traffic of one rank in one optimizer step.

    Attributes:
        num_bytes: Sent by a rank.
        seconds: If nothing else used the links.
        exposed_seconds: Of these, while no computation runs.
    """

    num_bytes: float = 0.0
    seconds: float = 0.0
    exposed_seconds: float = 0.0


def of_replicas(
    cluster: Cluster, *, num_ranks: int, gradient_bytes: float, backward_seconds: float, ops: Sequence[Op] = ()
) -> Communication:
    """Return DDP's: one all-reduce of the gradients, bucket by bucket during the last backward pass.

    An optimizer that divides its work sends its results in addition, which nothing hides.

    Args:
        cluster: The devices.
        num_ranks: That average gradients.
        gradient_bytes: Of the model.
        backward_seconds: Of the last micro-batch.
        ops: Of one step; the collectives among them are the optimizer's.
    """
    if num_ranks == 1:
        return Communication()
    sent = 2 * (num_ranks - 1) / num_ranks * gradient_bytes
    bandwidth, latency = cluster.bandwidth_between(num_ranks), cluster.reduction_latency(num_ranks)
    last = 2 * min(_BUCKET_BYTES, gradient_bytes) / bandwidth + latency
    seconds = sent / bandwidth + max(gradient_bytes / _BUCKET_BYTES, 1.0) * latency
    exposed = min(seconds, max(seconds - backward_seconds, last))
    results = [op.cost.num_bytes for op in ops if op.cost.kind == "collective"]
    sharing = sum(results) / bandwidth + len(results) * cluster.latency_between(num_ranks)
    return Communication(num_bytes=sent + sum(results), seconds=seconds + sharing, exposed_seconds=exposed + sharing)


def of_shards(
    ops: Sequence[Op], step: StepSeconds, cluster: Cluster, sharding: Sharding, *, num_micro_batches: int
) -> Communication:
    """Return FSDP2's, from the collectives that were recorded.

    What one section sends, the next gathers among it, is sent while the section before computes: FSDP2 gathers ahead,
    and reduces the gradients of a block while those of the next are computed.

    Args:
        ops: Of one step.
        step: Seconds of its sections.
        cluster: The devices.
        sharding: Ranks along each axis.
        num_micro_batches: Per optimizer step.
    """
    num_shards = sharding.mesh[-1]
    bandwidth, latency = cluster.bandwidth_between(num_shards), cluster.latency_between(num_shards)
    by_section: dict[str, float] = {}
    counts: dict[str, int] = {}
    for op in ops:
        if op.cost.kind == "collective":
            by_section[op.section] = by_section.get(op.section, 0.0) + op.cost.num_bytes
            counts[op.section] = counts.get(op.section, 0) + 1
    total = seconds = exposed = hidden_behind = 0.0
    for name, part in step.sections.items():
        repeats = num_micro_batches if "/" in name else 1
        sent = by_section.get(name, 0.0) * (num_shards - 1) / num_shards
        total += sent * repeats
        needed = sent / bandwidth + counts.get(name, 0) * latency
        seconds += needed * repeats
        exposed += max(needed - hidden_behind, 0.0) * repeats
        hidden_behind = part.total
    if len(sharding.mesh) > 1 and sharding.mesh[0] > 1:
        replicas = sharding.mesh[0]
        gradients = max((op.allocated.get("gradients", 0) for op in ops[:1]), default=0)
        sent = 2 * (replicas - 1) / replicas * gradients
        across = sent / cluster.bandwidth_between(replicas * num_shards)
        across += cluster.reduction_latency(replicas * num_shards)
        total, seconds = total + sent, seconds + across
        exposed += max(across - step.of("backward").total, 0.0)
    return Communication(num_bytes=total, seconds=seconds, exposed_seconds=exposed)


def of_partitions(
    zero: Zero, step: StepSeconds, cluster: Cluster, *, num_parameters: int, num_micro_batches: int, gathers_once: bool
) -> Communication:
    """Return ZeRO's: gradients to their owners, weights back to everybody.

    Args:
        zero: Stage and ranks.
        step: Seconds of the sections.
        cluster: The devices.
        num_parameters: Of the unsharded model.
        num_micro_batches: Per optimizer step.
        gathers_once: At stage 3, whether the gathered weights live until the backward pass.
    """
    if zero.num_ranks == 1:
        return Communication()
    size = num_parameters * (2 if zero.is_half else _FLOAT32) * (zero.num_ranks - 1) / zero.num_ranks
    bandwidth, latency = cluster.bandwidth_between(zero.num_ranks), cluster.latency_between(zero.num_ranks)
    forward, backward = step.of("forward/").total, step.of("backward/").total
    if zero.stage == 3:
        weights = size * (1 - zero.num_cast / (2 * num_parameters))
        gathered_again = 0.0 if gathers_once else weights
        sent = (weights + gathered_again + size) * num_micro_batches
        exposed = max(weights / bandwidth - forward, 0.0)
        exposed += max((gathered_again + size) / bandwidth - backward, 0.0)
        exposed *= num_micro_batches
    else:
        reductions = 1 if zero.stage == 1 else num_micro_batches
        sent = size * (reductions + 1)
        exposed = max(size / bandwidth - backward, 0.0) * reductions + size / bandwidth  # the weights come back after
    # one collective for each bucket; those of a stage follow each other, so that their latency shows
    waited = sent / (zero.bucket * (2 if zero.is_half else _FLOAT32)) * latency
    return Communication(num_bytes=sent, seconds=sent / bandwidth + waited, exposed_seconds=exposed + waited)
