"""Compute the cost of each place of a model from a recorded step: before the blocks, one block, after the blocks.

Places can be summed for other numbers of ranks without recording again; `stages` and `search` do that.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from torch import nn

from recipes.blocks import list_blocks, list_units, named_blocks
from recipes.mesh import Mesh
from recipes.plan.communication import WAITED_FOR, cost_of_collective
from recipes.plan.hardware import Cluster
from recipes.plan.memory import timeline
from recipes.plan.roofline import Seconds, StepSeconds
from recipes.plan.trace import FROZEN, GATHERED, GRADIENTS, KEPT, OPTIMIZER, WEIGHTS, Op

_STATE = (WEIGHTS, FROZEN, GRADIENTS, OPTIMIZER, GATHERED)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Cost of one place of a model, per rank and micro-batch.

    Attributes:
        num_parameters: Parameters in the unsharded model.
        forward: Seconds of the forward pass.
        backward: Seconds of the backward pass.
        kept_bytes: Bytes kept from the forward to the backward pass.
        extra_bytes: Peak of additional bytes during its computation.
        collectives: Tensor-, context- and expert-parallel collectives.
        num_copies: Copies of the place that `collectives` cover.
    """

    num_parameters: float = 0.0
    forward: Seconds = field(default_factory=Seconds)
    backward: Seconds = field(default_factory=Seconds)
    kept_bytes: float = 0.0
    extra_bytes: float = 0.0
    collectives: tuple[Op, ...] = ()
    num_copies: int = 1

    def sent(self, cluster: Cluster, mesh: Mesh) -> dict[str, tuple[float, float]]:
        """Return the bytes that a rank sends per micro-batch and the seconds this takes, by mesh dimension."""
        sums: dict[str, tuple[float, float]] = {}
        for op in self.collectives:
            stride = mesh.tensor if op.dimension == "context" else 1
            size, took = cost_of_collective(op, cluster, num_ranks=getattr(mesh, op.dimension), stride=stride)
            before = sums.get(op.dimension, (0.0, 0.0))
            sums[op.dimension] = before[0] + size / self.num_copies, before[1] + took / self.num_copies
        return sums


@dataclass(frozen=True, kw_only=True)
class Places:
    """Costs of all places of a model.

    Attributes:
        first: Everything before the blocks.
        block: Average block.
        last: Everything after the blocks.
        num_blocks: Blocks of the model.
        optimizer: Seconds to clip and step the parameters of one rank.
    """

    first: Place
    block: Place
    last: Place
    num_blocks: int
    optimizer: Seconds = field(default_factory=Seconds)

    def parts(self) -> Iterator[tuple[float, Place]]:
        """Yield each place with its number of occurrences in the model."""
        yield 1.0, self.first
        yield float(self.num_blocks), self.block
        yield 1.0, self.last


_NAMES = {"first": "embedding", "block": None, "last": "head"}  # place -> name in the tracer's sections


def describe_places(ops: Sequence[Op], model: nn.Module) -> Places:
    """Return the places of a recorded step, without times.

    Args:
        ops: Operators of the full model.
        model: Unsharded, on any device.
    """
    num_blocks = max(len(list_blocks(model)), 1)
    before, within, after = count_parameters(model)
    parameters = {"first": before, "block": within / num_blocks, "last": after}
    extra, kept = _extra_bytes(ops), sum_kept(ops)
    places = {}
    for key, name in _NAMES.items():
        own = [op for op in ops if _is_at(op.section, name)]
        copies = num_blocks if name is None else 1
        kept_bytes = sum(sizes.total() for place, sizes in kept.items() if _is_at(f"forward/{place}", name))
        places[key] = Place(
            num_parameters=parameters[key],
            kept_bytes=max(kept_bytes / copies, 0.0),
            extra_bytes=extra.get(key, 0.0),
            collectives=tuple(op for op in own if op.cost.kind == "collective" and op.dimension in WAITED_FOR),
            num_copies=copies,
        )
    return Places(first=places["first"], block=places["block"], last=places["last"], num_blocks=num_blocks)


def with_seconds(places: Places, step: StepSeconds) -> Places:
    """Return the places with the times of their recorded sections."""
    timed = {}
    for key, name in _NAMES.items():
        place: Place = getattr(places, key)
        seconds = {"forward": Seconds(), "backward": Seconds()}
        for section, part in step.sections.items():
            if _is_at(section, name):
                seconds[section.partition("/")[0]].add(part, times=1 / place.num_copies)
        timed[key] = replace(place, forward=seconds["forward"], backward=seconds["backward"])
    optimizer = step.of("clipping")
    optimizer.add(step.of("optimizer"))
    return replace(places, first=timed["first"], block=timed["block"], last=timed["last"], optimizer=optimizer)


def count_parameters(model: nn.Module) -> tuple[float, float, float]:
    """Return the parameters before, in and after the blocks; a tied weight counts in each place that uses it.

    What is between two towers of blocks counts as before them.
    """
    before = within = after = 0.0
    num_ahead = len(named_blocks(model))
    for unit, is_tower in list_units(model):
        if is_tower:
            within += _count(unit)
            num_ahead -= 1
        elif num_ahead:
            before += _count(unit)
        else:
            after += _count(unit)
    return before, within, after


def sum_kept(ops: Sequence[Op]) -> dict[str, Counter[str]]:
    """Return the bytes that each place keeps from the forward to the backward pass, by category."""
    kept: dict[str, Counter[str]] = {}
    for op in ops:
        direction, _, place = op.section.partition("/")
        if direction == "forward":
            sizes = kept.setdefault(place, Counter())
            for name in KEPT:
                sizes[name] += op.allocated.get(name, 0) - op.freed.get(name, 0)
    return kept


def _extra_bytes(ops: Sequence[Op]) -> dict[str, float]:
    """Return each place's peak bytes in excess of model state and everything kept for the backward pass so far."""
    kept = {place: sizes.total() for place, sizes in sum_kept(ops).items()}
    until = dict(zip(kept, accumulate(kept.values()), strict=True))
    extra: dict[str, float] = {}
    for moment in timeline(ops):
        place = moment.section.partition("/")[2]
        if place in until:
            key = {"embedding": "first", "head": "last"}.get(place, "block")
            beside = sum(size for name, size in moment.held.items() if name not in _STATE) - until[place]
            extra[key] = max(extra.get(key, 0.0), beside)
    return extra


def _is_at(section: str, name: str | None) -> bool:
    place = section.partition("/")[2]
    return bool(place) and (place not in ("embedding", "head") if name is None else place == name)


def _count(module: nn.Module) -> float:
    parameters: Iterable[nn.Parameter] = module.parameters()
    return float(sum(parameter.numel() for parameter in parameters))
