"""Memory of one rank over a step by category: recorded operators plus the strategy's own buffers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from recipes.plan.trace import FROZEN, GATHERED, GRADIENTS, OPTIMIZER, WEIGHTS, Op

MASTER = "master weights"
# DeepSpeed's defaults, in elements (0.19.8): weights that stage 3 keeps gathered, and weights prefetched at once
_MAX_LIVE, _PREFETCH = 1_000_000_000, 50_000_000
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Zero:
    """DeepSpeed's partitioning.

    Attributes:
        stage: 1: optimizer state; 2: also gradients; 3: also weights.
        num_ranks: Ranks that partition the state.
        bucket: Elements per reduction.
        num_buckets: 2 if communication overlaps with the backward pass.
        offloads_optimizer: Keep master weights, optimizer state and gradients in host memory.
        offloads_weights: Keep weight partitions in host memory, too.
        is_half: The weights are bfloat16, with a float32 master copy.
        num_cast: Number of float32 weights that stage 3 gathers in 2 bytes each.
    """

    stage: Literal[1, 2, 3]
    num_ranks: int
    bucket: int
    num_buckets: int
    offloads_optimizer: bool
    offloads_weights: bool
    is_half: bool
    num_cast: int = 0


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Live memory while an operator runs.

    Attributes:
        section: Part of the step.
        op: The operator.
        held: Bytes by category.
    """

    section: str
    op: str
    held: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.held.values())


def timeline(ops: Iterable[Op]) -> Iterator[Moment]:
    """Yield the live memory during each operator, in order."""
    held: Counter[str] = Counter()
    for op in ops:
        held.update(op.allocated)
        yield Moment(section=op.section, op=op.name, held={key: value for key, value in held.items() if value > 0})
        held.subtract(op.freed)


def with_zero(
    moments: Iterable[Moment],
    zero: Zero,
    *,
    num_parameters: int,
    num_trained: int,
    num_forward_only: int,
    accumulates: bool,
) -> Iterator[Moment]:
    """Yield the memory timeline of a step under ZeRO, given the timeline of one device without an optimizer step.

    DeepSpeed 0.19.8's allocations were taken from profiles of its steps; see benchmarks/plan_accuracy.py.

    Args:
        moments: Timeline of one device; for stages 2 and 3, of one that drops each gradient as soon as it is complete.
        zero: Stage and ranks.
        num_parameters: Parameters of the unsharded model.
        num_trained: Those that are trained, and have a master copy, gradients and optimizer state.
        num_forward_only: Those of frozen blocks without a backward pass, which stage 3 does not keep for one.
        accumulates: Whether gradients of earlier micro-batches already exist.
    """
    share, trained_share = (-(-number // zero.num_ranks) for number in (num_parameters, num_trained))
    weight_bytes = 2 if zero.is_half else _FLOAT32
    bucket = zero.bucket * weight_bytes * zero.num_buckets
    gathered, gathered_ahead = min(num_parameters - num_forward_only, _MAX_LIVE), min(num_parameters, _PREFETCH)
    optimizer = buffers = 0
    has_gradient = False
    static: dict[str, int] = {}
    for moment in moments:
        held = dict(moment.held)
        if not static:
            optimizer = -(-held.get(OPTIMIZER, 0) // zero.num_ranks)
            buffers = max(held.get(WEIGHTS, 0) - num_parameters * weight_bytes, 0)  # everything that is not a parameter
            static = {WEIGHTS: held.get(WEIGHTS, 0), OPTIMIZER: optimizer, MASTER: trained_share * _FLOAT32}
            if FROZEN in held:  # of models that no engine partitions
                static[FROZEN] = held[FROZEN]
            if zero.stage == 3:
                static |= {WEIGHTS: share * weight_bytes + buffers, GRADIENTS: trained_share * weight_bytes}
        is_forward = moment.section.startswith("forward")
        # gradients of earlier micro-batches do not need a bucket
        has_gradient = has_gradient or (not is_forward and held.get(GRADIENTS, 0) > 0)
        held |= static | {GRADIENTS: static.get(GRADIENTS, 0) + held.get(GRADIENTS, 0)}
        communication = bucket if has_gradient or zero.stage == 3 else 0
        if zero.stage == 2:
            # a buffer for the gradients of this micro-batch, in addition to the accumulated ones
            held[GRADIENTS] += trained_share * weight_bytes * (has_gradient + accumulates)
        if zero.stage == 3:
            # prefetched weights share one buffer until each has been copied out of it
            is_fetching = (is_forward and "head" not in moment.section) or num_parameters > _MAX_LIVE
            # weights that are gathered in the compute dtype take half the space in it
            part = 1 - zero.num_cast / (2 * num_parameters)
            communication += int((gathered + gathered_ahead * is_fetching * part) * weight_bytes)
        held[GATHERED] = held.get(GATHERED, 0) + communication
        yield Moment(section=moment.section, op=moment.op, held=held)
    if zero.stage == 1:
        # the step flattens this rank's share of the gradients while all gradients are still alive
        flattened = {GRADIENTS: num_trained * weight_bytes + trained_share * _FLOAT32, GATHERED: bucket}
        yield Moment(section="optimizer", op="flatten", held=static | flattened)


def with_unsharded_gradients(moments: Sequence[Moment], *, num_bytes: int) -> Iterator[Moment]:
    """Yield the memory timeline of the last micro-batch under FSDP2 with one reduction per step.

    Until its backward pass a rank holds the gradients of the full model and no shards. Then the gradients of each block
    are reduced to a shard after its backward pass; head and embedding share a group, which is reduced at the end.

    Args:
        moments: Timeline of a micro-batch that reduces its own gradients.
        num_bytes: Bytes of the full model's gradients.
    """
    sections = list(dict.fromkeys(moment.section for moment in moments if moment.section.startswith("backward/")))
    blocks = [section for section in sections if section not in ("backward/head", "backward/embedding")]
    num_reduced = 0
    for moment in moments:
        if "/" not in moment.section:
            yield moment
            continue
        if moment.section in blocks:
            num_reduced = blocks.index(moment.section)
        elif moment.section == "backward/embedding":
            num_reduced = len(blocks)
        reduced = num_reduced / max(len(sections), 1)
        changed = {
            GATHERED: moment.held.get(GATHERED, 0) + int(num_bytes * (1 - reduced)),
            GRADIENTS: int(moment.held.get(GRADIENTS, 0) * reduced),
        }
        yield Moment(section=moment.section, op=moment.op, held=moment.held | changed)


def find_peak(moments: Iterable[Moment]) -> Moment:
    """Return the peak of a memory timeline; the first one on a tie."""
    return max(moments, key=lambda moment: moment.total)
