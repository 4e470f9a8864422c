"""What ZeRO-3 holds of each parameter, a sub-group of parameters at a time: the rest may lie on a disk."""

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recipes.checkpoint.shard_file import Part, SavedTensor

# of a parameter: None is the master weight, a name a moment
Held = dict[nn.Parameter, dict[str | None, Tensor]]


def read_fragments(optimizer: Any, names: Sequence[str | None]) -> Held:
    """This rank's padded parts; copies of what lies on a disk.

    Args:
        optimizer: DeepSpeed's.
        names: None for the master weights, names of moments.
    """
    held: Held = {}
    for index, members in enumerate(optimizer.fp16_groups):
        with in_memory(optimizer, index, writes_back=False) as flat:
            state = optimizer.optimizer.state[flat]
            flats = {name: flat if name is None else state[name] for name in names}
            for parameter in members:
                parts = {
                    name: _fragment(optimizer, parameter, whole) for name, whole in flats.items()
                }
                on_disk = optimizer._swappable_optimizer_subgroup(index)
                held[parameter] = {
                    name: part.clone() if on_disk else part for name, part in parts.items()
                }
    return held


@torch.no_grad()
def write_weights(optimizer: Any, saved: Mapping[nn.Parameter, SavedTensor]) -> None:
    """Into the master weights, and from there, as after a step, into those that compute."""
    for index, members in enumerate(optimizer.fp16_groups):
        with in_memory(optimizer, index, writes_back=True) as flat:
            for parameter in members:
                part = _padded(parameter, saved[parameter])
                _fragment(optimizer, parameter, flat).copy_(part)
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        for parameter in members:
            if parameter.numel() == parameter.ds_numel:  # small ones stay whole on every rank
                parameter.data.copy_(saved[parameter].whole())


@torch.no_grad()
def write_frozen(parameter: Any, saved: SavedTensor) -> None:
    """Into a parameter that is not trained: it has no master copy."""
    part = _padded(parameter, saved)
    if parameter.ds_tensor.status.name == "AVAILABLE":
        parameter.ds_tensor.copy_(part)
    else:  # on a disk
        parameter.nvme_swapper.swap_out_partitioned_params([parameter], [part])
    if parameter.numel() == parameter.ds_numel:
        parameter.data.copy_(saved.whole())


@torch.no_grad()
def write_moments(
    optimizer: Any, saved: Mapping[nn.Parameter, Mapping[str, SavedTensor]], scalars: dict[str, Any]
) -> None:
    """Make the state of every sub-group, which the first step would make, from saved moments.

    Args:
        optimizer: DeepSpeed's, before its first step.
        saved: What each element has, by name.
        scalars: What a whole parameter has, such as Adam's step.
    """
    for index, members in enumerate(optimizer.fp16_groups):
        with in_memory(optimizer, index, writes_back=True) as flat:
            moments = {name: torch.zeros_like(flat.data) for name in saved[members[0]]}
            for parameter in members:
                for name, moment in moments.items():
                    part = _padded(parameter, saved[parameter][name])
                    _fragment(optimizer, parameter, moment).copy_(part)
            # Adam counts in place: each has a count of its own
            optimizer.optimizer.state[flat] = {**copy.deepcopy(scalars), **moments}


def part_of(parameter: Any, held: Tensor) -> Part | None:
    """What a rank writes of its padded part; None: it holds padding alone."""
    start, stop = _bounds(parameter)
    if start >= stop:
        return None
    tensor = held.detach().flatten()[: stop - start]
    return Part(tensor=tensor, offsets=(start,), unsharded_shape=parameter.ds_shape)


@contextlib.contextmanager
def in_memory(optimizer: Any, sub_group: int, *, writes_back: bool) -> Iterator[Tensor]:
    """The flat master weights of a sub-group; its moments are in memory with them."""
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
    """A parameter's range in what a sub-group has, flat."""
    _, start, num_elements = optimizer.grad_position[optimizer.get_param_id(parameter)]
    return flat.narrow(0, start, num_elements)


def _bounds(parameter: Any) -> tuple[int, int]:
    """Where this rank's part begins and ends in the flattened whole."""
    size, num_elements = parameter.ds_tensor.ds_numel, math.prod(parameter.ds_shape)
    start = min(size * torch.distributed.get_rank(), num_elements)
    return start, min(start + size, num_elements)


def _padded(parameter: Any, saved: SavedTensor) -> Tensor:
    """This rank's part, padded with zeros: all ranks' parts are equally long."""
    start, stop = _bounds(parameter)
    mine = saved.part(start, stop)
    return torch.cat([mine, mine.new_zeros(parameter.ds_tensor.ds_numel - len(mine))])
