"""Read and write ZeRO-3 shards one sub-group at a time; the other sub-groups may be on disk."""

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recipes.checkpoint.saved_tensor import SavedTensor
from recipes.checkpoint.shard_file import Part

# by parameter, then by optimizer state name (None for the master weights): a flat, padded tensor
Fragments = dict[nn.Parameter, dict[str | None, Tensor]]


def read_fragments(optimizer: Any, names: Sequence[str | None]) -> Fragments:
    """Return this rank's padded fragments: views of those in memory, copies of those on disk.

    Args:
        optimizer: DeepSpeed's optimizer.
        names: Optimizer state names; None selects the master weights.
    """
    fragments: Fragments = {}
    for index, members in enumerate(optimizer.fp16_groups):
        with in_memory(optimizer, index, writes_back=False) as flat:
            state = optimizer.optimizer.state[flat]
            flats = {name: flat if name is None else state[name] for name in names}
            # buffers of sub-groups read from disk are released at the end of this block
            on_disk = optimizer._swappable_optimizer_subgroup(index)
            for parameter in members:
                views = {name: _fragment(optimizer, parameter, flats[name]) for name in names}
                fragments[parameter] = {name: view.clone() if on_disk else view for name, view in views.items()}
    return fragments


@torch.no_grad()
def write_weights(optimizer: Any, saved: Mapping[nn.Parameter, SavedTensor]) -> None:
    """Write the master weights and, as DeepSpeed does after a step, the low-precision weights."""
    for index, members in enumerate(optimizer.fp16_groups):
        with in_memory(optimizer, index, writes_back=True) as flat:
            for parameter in members:
                fragment = _read_padded(parameter, saved[parameter])
                _fragment(optimizer, parameter, flat).copy_(fragment)
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        for parameter in members:
            # small parameters stay gathered on every rank: nothing else would refresh that copy before a step
            if parameter.numel() == parameter.ds_numel:
                parameter.data.copy_(saved[parameter].read())


@torch.no_grad()
def write_frozen(parameter: Any, saved: SavedTensor) -> None:
    """Write a frozen parameter, which has no master weights."""
    fragment = _read_padded(parameter, saved)
    if parameter.ds_tensor.status.name == "AVAILABLE":
        parameter.ds_tensor.copy_(fragment)
    else:  # on disk
        parameter.nvme_swapper.swap_out_partitioned_params([parameter], [fragment])
    if parameter.numel() == parameter.ds_numel:
        parameter.data.copy_(saved.read())


@torch.no_grad()
def write_moments(
    optimizer: Any, saved: Mapping[nn.Parameter, Mapping[str, SavedTensor]], scalars: Sequence[dict[str, Any]]
) -> None:
    """Create the optimizer state of every sub-group from saved tensors, instead of letting the first step create it.

    Args:
        optimizer: DeepSpeed's optimizer, before its first step.
        saved: Per-element state, by parameter and name.
        scalars: Other state of each sub-group, such as Adam's `step`.
    """
    for index, members in enumerate(optimizer.fp16_groups):
        with in_memory(optimizer, index, writes_back=True) as flat:
            # [elements on this rank], including padding
            moments = {name: torch.zeros_like(flat.data) for name in saved[members[0]]}
            for parameter in members:
                for name, moment in moments.items():
                    fragment = _read_padded(parameter, saved[parameter][name])
                    _fragment(optimizer, parameter, moment).copy_(fragment)
            # torch counts steps in place: sub-groups sharing one tensor would count each step several times
            optimizer.optimizer.state[flat] = {**copy.deepcopy(scalars[index]), **moments}


def fragment_part(parameter: Any, fragment: Tensor) -> Part | None:
    """Return the part of a padded fragment that this rank writes; None if it is all padding."""
    start, stop = _bounds(parameter)
    if start >= stop:
        return None
    tensor = fragment.detach().flatten()[: stop - start]  # [elements on this rank], without padding
    return Part(tensor=tensor, offsets=(start,), unsharded_shape=parameter.ds_shape)


@contextlib.contextmanager
def in_memory(optimizer: Any, sub_group: int, *, writes_back: bool) -> Iterator[Tensor]:
    """Yield the flat master weights of a sub-group while they and the optimizer state are in memory.

    Args:
        optimizer: DeepSpeed's optimizer.
        sub_group: Index of the sub-group.
        writes_back: Whether to write a sub-group from disk back; False discards changes.
    """
    flat: Tensor = optimizer.fp32_partitioned_groups_flat[sub_group]
    on_disk = optimizer._swappable_optimizer_subgroup(sub_group)
    if on_disk:
        optimizer._optimizer_states_and_gradient_swap_in(sub_group)
    yield flat
    if on_disk and writes_back:
        optimizer._optimizer_states_and_gradient_swap_out(sub_group)
    elif on_disk:
        optimizer._release_swap_buffers(sub_group)


def _fragment(optimizer: Any, parameter: nn.Parameter, flat: Tensor) -> Tensor:
    """Return a parameter's padded range of a sub-group's flat tensor."""
    _, start, num_elements = optimizer.grad_position[optimizer.get_param_id(parameter)]
    return flat.narrow(0, start, num_elements)


def _bounds(parameter: Any) -> tuple[int, int]:
    """Return the start and end of this rank's fragment in the flattened parameter, without padding."""
    size, num_elements = parameter.ds_tensor.ds_numel, math.prod(parameter.ds_shape)
    start = min(size * torch.distributed.get_rank(), num_elements)
    return start, min(start + size, num_elements)


def _read_padded(parameter: Any, saved: SavedTensor) -> Tensor:
    """Read this rank's fragment, zero-padded to the common length of all ranks."""
    start, stop = _bounds(parameter)
    elements = saved.read_range(start, stop)
    padding = elements.new_zeros(parameter.ds_tensor.ds_numel - len(elements))
    return torch.cat([elements, padding])  # [ds_numel]
