"""Extrapolate the operators of a deep model from two shallow copies: blocks repeat, everything else is linear.

Recording a copy with a few blocks takes a fraction of a second at any model depth, so that dozens of settings can be
compared. If the two copies are inconsistent, the full model is recorded.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import nn

from recipes.blocks import list_blocks
from recipes.plan.trace import Op

_ATTEMPTS = 2  # the garbage collector may free a storage within one block of one copy only
Recorder = Callable[[Sequence[int] | None], list[Op]]


def record_unrolled(record: Recorder, kinds: Sequence[object]) -> list[Op]:
    """Return the operators of a step of the full model.

    Args:
        record: Records the model with only the blocks at these indices; None: all blocks.
        kinds: Kind of each block; blocks of one kind run the same operators.
    """
    num_blocks, repeats = len(kinds), _find_repeats(kinds)
    if repeats is None:
        return record(None)
    first, period = repeats
    if num_blocks <= first + 3 * period + 1:
        return record(None)
    last = num_blocks - 1
    num_copies = (num_blocks - first - 1) // period
    for _ in range(_ATTEMPTS):
        short = record([*range(first + 2 * period), last])
        long = record([*range(first + 3 * period), last])
        unrolled = _unroll(short, long, first=first, period=period, num_copies=num_copies)
        if unrolled is not None:
            return unrolled
    return record(None)


def _find_repeats(kinds: Sequence[object]) -> tuple[int, int] | None:
    """Return the first repeating block and the period; None if the kinds do not repeat.

    The block before it must be of the kind that precedes a period, because FSDP2 gathers it during that block's
    backward pass.
    """
    for first in range(1, len(kinds) - 3):
        period = find_period(kinds[first - 1 :])
        if period is not None and kinds[first - 1] == kinds[first - 1 + period]:
            return first, period
    return None


def find_period(kinds: Sequence[object]) -> int | None:
    """Return the period with which block kinds repeat between the first and the last block; None if they do not."""
    middle = kinds[1:-1]
    for period in range(1, len(middle) // 3 + 1):
        repeats = all(kind == middle[index % period] for index, kind in enumerate(middle))
        if len(middle) % period == 0 and repeats:
            return period
    return None


def block_kinds(model: nn.Module, *, recomputes: Callable[[int], bool]) -> list[object]:
    """Return the kind of each block: its modules, the shapes and training of its parameters, and if it is recomputed.

    Args:
        model: Model on any device.
        recomputes: Whether the block at an index is recomputed.
    """
    kinds: list[object] = []
    for index, block in enumerate(list_blocks(model)):
        modules = tuple((type(module), module.extra_repr()) for module in block.modules())
        shapes = tuple((tuple(parameter.shape), parameter.requires_grad) for parameter in block.parameters())
        kinds.append((modules, shapes, recomputes(index)))
    return kinds


def _unroll(short: list[Op], long: list[Op], *, first: int, period: int, num_copies: int) -> list[Op] | None:
    """Return the operators of a model with `num_copies` periods; None if the recordings do not repeat.

    Args:
        short: Operators with two periods.
        long: Operators with three periods.
        first: Index of the first block of the first period.
        period: Blocks per period.
        num_copies: Number of periods in the result.
    """
    short_parts, long_parts = (_split(ops, first=first, period=period) for ops in (short, long))
    others = [part for part in long_parts if "/middle " not in part[0]]
    short_others = [part for part in short_parts if "/middle " not in part[0]]
    if [name for name, _ in others] != [name for name, _ in short_others]:
        return None
    repeated = {name.partition("/")[0]: ops for name, ops in long_parts if name.endswith("/middle 1")}
    for name, ops in [*short_parts, *long_parts]:
        direction, _, place = name.partition("/")
        if place.startswith("middle") and _signatures(ops) != _signatures(repeated.get(direction, [])):
            return None
    extra = num_copies - 2
    result: list[Op] = []
    changed = dict(_extrapolated(others, short_others, extra))
    if len(changed) != len(others):
        return None
    for name, _ in long_parts:
        direction, _, place = name.partition("/")
        if not place.startswith("middle"):
            result += changed[name]
        elif place == "middle 1":
            copies = range(num_copies)
            for copy in copies if direction == "forward" else reversed(copies):
                result += [replace(op, section=f"{direction}/middle {copy}") for op in repeated[direction]]
    return result


def _split(ops: list[Op], *, first: int, period: int) -> list[tuple[str, list[Op]]]:
    """Return the parts of a step in order; the blocks of a period form one part, such as `forward/middle 1`."""
    last = max(_index(op.section) for op in ops)

    def part(op: Op) -> str:
        index = _index(op.section)
        direction = op.section.partition("/")[0]
        if index == last:
            return f"{direction}/last block"
        return op.section if index < first else f"{direction}/middle {(index - first) // period}"

    return [(name, list(group)) for name, group in itertools.groupby(ops, key=part)]


def _index(section: str) -> int:
    _, _, place = section.partition("/")
    return int(place.removeprefix("block ")) if place.startswith("block ") else -1


def _signatures(ops: Iterable[Op]) -> list[tuple[object, ...]]:
    """Return the properties that repeated blocks must share, operator by operator."""
    return [(op.name, op.cost, sum(op.allocated.values()), sum(op.freed.values())) for op in ops]


def _extrapolated(
    long: list[tuple[str, list[Op]]], short: list[tuple[str, list[Op]]], extra: int
) -> list[tuple[str, list[Op]]]:
    """Return the parts outside the periods, scaled by the number of periods: gradients, optimizer, clipping."""
    results = []
    for (name, ops), (_, before) in zip(long, short, strict=True):
        if [op.name for op in ops] != [op.name for op in before]:
            break
        pairs = zip(ops, before, strict=True)
        results.append((name, [_grow(op, previous, extra) for op, previous in pairs]))
    return results


def _grow(op: Op, previous: Op, extra: int) -> Op:
    """Return an operator of the three-period model, extrapolated to `extra` periods more than two."""

    def sums(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
        counted = Counter(before)
        for key in {*now, *before}:
            counted[key] += extra * (now.get(key, 0) - before.get(key, 0))
        return {key: value for key, value in counted.items() if value}

    cost, old = op.cost, previous.cost
    return replace(
        op,
        allocated=sums(op.allocated, previous.allocated),
        freed=sums(op.freed, previous.freed),
        cost=replace(
            cost,
            flops=old.flops + extra * (cost.flops - old.flops),
            num_bytes=old.num_bytes + extra * (cost.num_bytes - old.num_bytes),
        ),
    )
