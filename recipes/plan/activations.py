"""What `activation_checkpoint` adds to a recorded step: time on the link to the host, and a memory budget."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from unittest.mock import patch

from torch import Tensor

from recipes.activation_checkpoint import host_offload
from recipes.plan.roofline import StepSeconds
from recipes.plan.trace import ACTIVATIONS, KEPT, OFFLOADED, TEMPORARY, Op, StepTracer

PCIE_BYTES_PER_SECOND = 20e9  # each way, page-locked memory: fourth generation with 16 lanes; depends on the host


@contextlib.contextmanager
def mark_host_copies(tracer: StepTracer) -> Iterator[None]:
    """Let the tracer know what is in host memory: fake tensors all lie on the CPU."""
    allocate = host_offload.allocate_host

    def marked(num_bytes: int, *, pinned: bool) -> Tensor:
        host = allocate(num_bytes, pinned=pinned)
        tracer.add(host, category=OFFLOADED)
        return host

    with patch.object(host_offload, "allocate_host", marked):
        yield


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What blocks send to host memory and fetch back.

    Attributes:
        num_bytes: There and back, of a micro-batch.
        seconds: On the link, of a micro-batch.
        exposed_seconds: Of these, in which the device waits.
    """

    num_bytes: float
    seconds: float
    exposed_seconds: float


def time_transfers(ops: Sequence[Op], step: StepSeconds) -> Transfer | None:
    """Return what is sent in a micro-batch; None: nothing.

    What a block saves leaves while the next one computes, and comes back while the next one computes backward. So all
    blocks but the first hide it.

    Args:
        ops: Of one micro-batch.
        step: Seconds of its sections.
    """
    transfers = [op for op in ops if op.cost.kind == "transfer"]
    sent = {
        direction: sum(op.cost.num_bytes for op in transfers if op.section.startswith(direction))
        for direction in ("forward/", "backward/")
    }
    if not any(sent.values()):
        return None
    exposed = 0.0
    for direction, num_bytes in sent.items():
        hidden_behind = sum(
            part.total
            for section, part in step.sections.items()
            if section.startswith(direction) and section.partition("/")[2] not in ("embedding", "head", "block 0")
        )
        exposed += max(num_bytes / PCIE_BYTES_PER_SECOND - hidden_behind, 0.0)
    num_bytes = sum(sent.values())
    return Transfer(num_bytes=num_bytes, seconds=num_bytes / PCIE_BYTES_PER_SECOND, exposed_seconds=exposed)


def keep_budget(ops: Sequence[Op], fraction: float) -> list[Op]:
    """Return a step whose blocks keep a fraction of their activations, from one that keeps all.

    A plan does not run torch's partitioner, so two things are assumed. Each block keeps its output and the fraction of
    everything else. The same share of its forward pass, by time, is computed again: at most, because the partitioner
    recomputes what costs least for its bytes first.

    Args:
        ops: Of a step that recomputes nothing.
        fraction: The budget.
    """
    recomputed = 1.0 - fraction
    if not recomputed:
        return list(ops)
    forward: dict[str, tuple[list[Op], int]] = {}  # place -> its operators, bytes to recompute
    result: list[Op] = []
    for section, group in groupby(ops, key=lambda op: op.section):
        direction, _, place = section.partition("/")
        part = list(group)
        if direction == "forward" and place not in ("", "embedding", "head"):
            kept, dropped = _drop(part, recomputed)
            forward[place] = part, dropped
            part = kept
        elif direction == "backward" and place in forward:
            again, num_bytes = forward.pop(place)
            repeats = [_repeat(op, section, recomputed) for op in again if op.cost.kind not in ("view", "collective")]
            if repeats:
                repeats[0] = replace(repeats[0], allocated={ACTIVATIONS: num_bytes})
            result += repeats
        result += part
    return result


def _drop(part: list[Op], share: float) -> tuple[list[Op], int]:
    """Return the forward pass of a block that drops a share of what it keeps when it ends; and its bytes."""
    makers = [number for number, op in enumerate(part) if any(op.allocated.get(name, 0) for name in KEPT)]
    total = 0
    kept = list(part)
    for number in makers[:-1]:  # the last one makes the block's output
        allocated = dict(part[number].allocated)
        for name in KEPT:
            num_bytes = round(share * allocated.get(name, 0))
            if num_bytes:
                allocated[name] -= num_bytes
                allocated[TEMPORARY] = allocated.get(TEMPORARY, 0) + num_bytes
                total += num_bytes
        kept[number] = replace(part[number], allocated=allocated)
    last = kept[-1]
    kept[-1] = replace(last, freed=last.freed | {TEMPORARY: last.freed.get(TEMPORARY, 0) + total})
    return kept, total


def _repeat(op: Op, section: str, share: float) -> Op:
    """Return an operator of the forward pass again, in the backward pass and as much of it as is recomputed."""
    cost = replace(op.cost, flops=share * op.cost.flops, num_bytes=share * op.cost.num_bytes)
    return replace(
        op,
        section=section,
        cost=cost,
        allocated={},
        freed={},
        reads={number: share * size for number, size in op.reads.items()},
        writes={number: share * size for number, size in op.writes.items()},
    )
