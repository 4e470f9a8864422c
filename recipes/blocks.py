"""Blocks of a model by name: the units of sharding, compilation, recomputation, adapters and pipeline stages.

Most models have one tower of blocks, the attribute `blocks`. A model with several, such as an image encoder before a
decoder, has a method `named_blocks()` instead, which returns them by name: `{"vision.blocks": …, "text.blocks": …}`.
A model of values that a policy has as its child (`recipes.model.score.ValueModel`) adds its towers to those of the
policy. A model of which an adapter adapts some of the towers only has a method `adapted_blocks()` that returns these.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn

# in order; a pipeline rank has some blocks of a tower, by their index in the whole model
Tower = nn.ModuleList | nn.Sequential | nn.ModuleDict


def named_blocks(model: nn.Module) -> dict[str, Tower]:
    """Return the towers of a model by name, in the order in which they run; empty if it has no blocks."""
    with apart(model) as beside:
        towers = _named_blocks(model)
    return (
        towers
        if beside is None
        else towers | {f"value.trunk.{name}": each for name, each in named_blocks(beside).items()}
    )


@contextmanager
def apart(model: nn.Module) -> Iterator[nn.Module | None]:
    """Take the model of values out of a policy for a while, and yield it; None: there is none.

    What is left has the names of the language model alone, and so has the other one.
    """
    value = getattr(model, "value", None)
    trunk: nn.Module | None = getattr(value, "trunk", None)
    if trunk is None:
        yield None
        return
    del model._modules["value"]
    try:
        yield trunk
    finally:
        model._modules["value"] = value


def _named_blocks(model: nn.Module) -> dict[str, Tower]:
    name_blocks = getattr(model, "named_blocks", None)
    if name_blocks is not None:
        towers: dict[str, Tower] = name_blocks()
        return towers
    blocks = getattr(model, "blocks", None)
    return {} if blocks is None else {"blocks": blocks}


def list_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of all towers in the order in which they run; empty if the model has none."""
    return [block for tower in named_blocks(model).values() for block in _list_tower(tower)]


def list_adapted_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks whose layers an adapter adapts: those that `adapted_blocks()` gives, else all."""
    adapted_blocks = getattr(model, "adapted_blocks", None)
    return list_blocks(model) if adapted_blocks is None else _list_tower(adapted_blocks())


def list_units(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield each tower and its siblings, in the model and in the modules that contain a tower, and whether it is one.

    A model without towers yields its children.
    """
    towers = {id(tower) for tower in named_blocks(model).values()}
    yield from _list_units(model, towers)


def _list_units(module: nn.Module, towers: Collection[int]) -> Iterator[tuple[nn.Module, bool]]:
    for child in module.children():
        if id(child) not in towers and any(id(part) in towers for part in child.modules()):
            yield from _list_units(child, towers)
        else:
            yield child, id(child) in towers


def keep_blocks(model: nn.Module, indices: Collection[int]) -> None:
    """Remove all other blocks from a model in place.

    Args:
        model: Model of a single process, whose towers are lists.
        indices: Indices of the blocks to keep among those of all towers, in the order of `list_blocks`.
    """
    first = 0
    for tower in named_blocks(model).values():
        assert not isinstance(tower, nn.ModuleDict), "only a pipeline rank has some blocks already"
        length = len(tower)
        for index in reversed(range(length)):
            if first + index not in indices:
                del tower[index]
        first += length


def _list_tower(tower: Tower) -> list[nn.Module]:
    return list(tower.values() if isinstance(tower, nn.ModuleDict) else tower)
