"""Model activation offloading (transfer time) and memory budgets on top of a recorded step."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from unittest.mock import patch

from torch import Tensor

from recipes.activation_checkpoint import host_offload
from recipes.plan.roofline import StepSeconds
from recipes.plan.trace import KEPT, OFFLOADED, TEMPORARY, Op, StepTracer

PCIE_BYTES_PER_SECOND = 20e9  # each way, pinned memory: PCIe 4.0 x16; depends on the host


@contextlib.contextmanager
def mark_host_copies(tracer: StepTracer) -> Iterator[None]:
    """Mark tensors in host memory for the tracer: all fake tensors are on the CPU."""
    allocate = host_offload.allocate_host

    def marked(num_bytes: int, *, pinned: bool) -> Tensor:
        host = allocate(num_bytes, pinned=pinned)
        tracer.add(host, category=OFFLOADED)
        return host

    with patch.object(host_offload, "allocate_host", marked):
        yield


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Activation offloading to host memory and back.

    Attributes:
        num_bytes: Bytes in both directions per micro-batch.
        seconds: Transfer time per micro-batch.
        exposed_seconds: Part of `seconds` during which the device waits.
    """

    num_bytes: float
    seconds: float
    exposed_seconds: float


def time_transfers(ops: Sequence[Op], step: StepSeconds) -> Transfer | None:
    """Return the transfers of a micro-batch; None without offloading.

    Saved activations of a block are sent during the next block's forward pass, and fetched during its backward pass. So
    all blocks but the first hide the transfers.

    Args:
        ops: Operators of one micro-batch.
        step: Time per section.
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
    """Model a memory budget: return a step whose blocks keep only a fraction of their activations.

    A plan does not run torch's partitioner, so it assumes that each block keeps its output and the given fraction of
    everything else, and recomputes the rest of its forward pass by time. This is an upper bound, because the
    partitioner first recomputes what is cheapest per byte.

    Args:
        ops: Operators of a step without recomputation.
        fraction: Memory budget.
    """
    recomputed = 1.0 - fraction
    if not recomputed:
        return list(ops)
    forward: dict[str, tuple[list[Op], Counter[str]]] = {}  # place -> operators, bytes to recompute by category
    result: list[Op] = []
    for section, group in groupby(ops, key=lambda op: op.section):
        direction, _, place = section.partition("/")
        part = list(group)
        if direction == "forward" and place not in ("", "embedding", "head"):
            kept, dropped = drop_kept(part, dict.fromkeys(KEPT, recomputed))
            forward[place] = part, dropped
            part = kept
        elif direction == "backward" and place in forward:
            again, dropped = forward.pop(place)
            repeats = [_repeat(op, section, recomputed) for op in again if op.cost.kind not in ("view", "collective")]
            if repeats:
                repeats[0] = replace(repeats[0], allocated=dict(dropped))
            result += repeats
        result += part
    return result


def drop_kept(part: Sequence[Op], shares: Mapping[str, float]) -> tuple[list[Op], Counter[str]]:
    """Return a block's forward pass that frees a part of what it keeps at its end, and the bytes freed, by category.

    Args:
        part: Operators of the forward pass of a block.
        shares: Fraction to free of everything but the block's output, by category; below 0, that much more is kept.
    """
    makers = [number for number, op in enumerate(part) if any(op.allocated.get(name, 0) for name in KEPT)]
    dropped: Counter[str] = Counter()
    kept = list(part)
    for number in makers[:-1]:  # the last one makes the block's output
        allocated = dict(part[number].allocated)
        for name, share in shares.items():
            num_bytes = round(share * allocated.get(name, 0))
            if num_bytes:
                allocated[name] -= num_bytes
                allocated[TEMPORARY] = allocated.get(TEMPORARY, 0) + max(num_bytes, 0)
                dropped[name] += num_bytes
        kept[number] = replace(part[number], allocated=allocated)
    last, total = kept[-1], sum(max(num_bytes, 0) for num_bytes in dropped.values())
    kept[-1] = replace(last, freed=last.freed | {TEMPORARY: last.freed.get(TEMPORARY, 0) + total})
    return kept, dropped


def _repeat(op: Op, section: str, share: float) -> Op:
    """Repeat a forward operator in the backward pass, scaled to the recomputed fraction."""
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
