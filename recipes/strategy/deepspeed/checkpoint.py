"""Save and load ZeRO-partitioned weights and optimizer state under torch's parameter names.

DeepSpeed's own checkpoints fit only one world size and stage and contain pickled objects; these load in every strategy.
No collectives.
"""

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recipes.checkpoint.layout import FLATS, are_equal
from recipes.checkpoint.saved_tensor import SavedTensor
from recipes.checkpoint.shard_file import Part
from recipes.checkpoint.shards import get_shards, unsharded_part
from recipes.errors import ConfigError

_OF_TORCH = ("state", "param_groups")  # keys of every optimizer's `state_dict`


class ZeroState:
    """Returns and loads this rank's partition of weights and optimizer state."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []

    def remember(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the parameters in torch's order before DeepSpeed replaces them with flat ones."""
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def model(self, module: nn.Module, *, writes_unsharded: bool) -> dict[str, Part]:
        """Return this rank's shards of a module by name, from the float32 master weights if there are any.

        Args:
            module: The module that DeepSpeed's engine wraps.
            writes_unsharded: Whether this rank writes tensors that are unsharded on every rank.
        """
        parts: dict[str, Part] = {}
        optimizer = _stage_3_optimizer(module.parameters())
        fragments = read_fragments(optimizer, [None]) if optimizer is not None else {}
        parameters: Iterator[tuple[str, Any]] = module.named_parameters(remove_duplicate=False)
        for name, parameter in parameters:
            if hasattr(parameter, "ds_id"):
                local_shard = parameter.ds_tensor
                fragment = fragments[parameter][None] if parameter in fragments else local_shard
                part = fragment_part(parameter, fragment)
            else:
                part = _part(parameter, None, writes_unsharded=writes_unsharded)
            if part is not None:
                parts[name] = part
        persistent = module.state_dict(keep_vars=True)
        buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
        return parts | get_shards(buffers, constant=(), writes_unsharded=writes_unsharded, row_orders={})

    @torch.no_grad()
    def optimizer(self, optimizer: Any, *, writes_unsharded: bool) -> dict[str, Any]:
        """Return this rank's shards of the optimizer state, keyed like torch's `state_dict`, and the hyperparameters.

        Args:
            optimizer: DeepSpeed's optimizer.
            writes_unsharded: Whether this rank writes tensors that are unsharded on every rank.
        """
        state: dict[int, dict[str, Any]] = {}
        _link(optimizer)
        names, of_flats = _split_state(optimizer)
        scalars = {name: value for name, value in of_flats[0].items() if _is_scalar(value)}
        sharded = is_stage_3(optimizer)
        fragments = read_fragments(optimizer, names) if sharded else {}
        for index, parameter in enumerate(self._parameters):
            parts = {
                name: fragment_part(parameter, fragments[parameter][name])
                if sharded
                else _part(parameter, name, writes_unsharded=False)
                for name in names
            }
            state[index] = {name: part for name, part in parts.items() if part is not None}
            if writes_unsharded:
                state[index] |= {
                    name: unsharded_part(value) if isinstance(value, Tensor) else value
                    for name, value in scalars.items()
                }
        base = optimizer.optimizer
        others = {key: value for key, value in base.state.items() if isinstance(key, str)}  # of no parameter
        saved = _read_top(optimizer)
        if any(values.keys() - {"step"} or not are_equal(values, of_flats[0]) for values in of_flats):
            saved[FLATS] = of_flats
        return saved | {
            "state": (state if names or scalars else {}) | others,
            "param_groups": self._groups(optimizer),
        }

    def _groups(self, optimizer: Any) -> list[dict[str, Any]]:
        """Return each group's hyperparameters with its parameter indices in torch's order."""
        index_by_id = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        groups = []
        for group, members in zip(optimizer.param_groups, _list_members(optimizer), strict=True):
            hyperparameters = {key: value for key, value in group.items() if key != "params"}
            groups.append(hyperparameters | {"params": sorted(index_by_id[id(parameter)] for parameter in members)})
        return groups

    @torch.no_grad()
    def load_model(self, module: nn.Module, saved: Mapping[str, SavedTensor]) -> None:
        """Copy saved tensors into this rank's shards of the weights and master weights.

        Args:
            module: The module that DeepSpeed's engine wraps.
            saved: Saved tensors by name.
        """
        # a checkpoint may omit frozen parameters
        named = {name: p for name, p in module.named_parameters() if p.requires_grad or name in saved}
        optimizer = _stage_3_optimizer(named.values())
        if optimizer is not None:
            write_weights(optimizer, {parameter: saved[name] for name, parameter in named.items()})
        for name, parameter in named.items():
            if not hasattr(parameter, "ds_id"):
                _write(parameter, saved[name])
            elif not parameter.requires_grad:
                write_frozen(parameter, saved[name])
        persistent = module.state_dict(keep_vars=True)
        for name, buffer in module.named_buffers():
            if name in persistent:
                buffer.copy_(saved[name].read())

    @torch.no_grad()
    def load_optimizer(self, optimizer: Any, saved: dict[str, Any]) -> None:
        """Load saved state into DeepSpeed's optimizer.

        Args:
            optimizer: DeepSpeed's optimizer, before its first step.
            saved: State keyed like torch's `state_dict`, with `SavedTensor` for tensors of parameters; under `flats`,
                what the same rank kept beside per-element state for each of its flat partitions.

        Raises:
            ConfigError: The optimizer has further entries in its `state_dict`, which DeepSpeed gives no way to load.
        """
        if top := sorted(saved.keys() - {*_OF_TORCH, FLATS}):
            raise ConfigError(
                f"strategy=deepspeed_… with {type(optimizer.optimizer).__name__}",
                f"its state dict also holds {' '.join(top)}, which DeepSpeed gives no way to load",
                "strategy=fsdp",
            )
        optimizer.optimizer.state.update({key: value for key, value in saved["state"].items() if isinstance(key, str)})
        if not any(values for key, values in saved["state"].items() if isinstance(key, int)):
            return
        moments: dict[Any, dict[str, Any]] = {
            parameter: {name: value for name, value in saved["state"][index].items() if _is_per_element(value)}
            for index, parameter in enumerate(self._parameters)
        }
        first = next(values for key, values in saved["state"].items() if isinstance(key, int))
        num_flats = len(flat_weights(optimizer))
        scalars = [_read_scalars(optimizer, values) for values in saved.get(FLATS) or [first] * num_flats]
        if is_stage_3(optimizer):
            write_moments(optimizer, moments, scalars)
            return
        for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
            # [elements on this rank], including padding, which no parameter overwrites
            zeros = {name: torch.zeros_like(flat.data) for name in moments[self._parameters[0]]}
            # torch counts steps in place: groups sharing one tensor would count each step twice
            optimizer.optimizer.state[flat] = {**copy.deepcopy(scalars[index]), **zeros}
        _link(optimizer)
        for parameter, values in moments.items():
            mapping: Any = parameter._hp_mapping
            for name, value in values.items() if mapping is not None else ():
                mapping.get_hp_fragment(name).copy_(_read_fragment(mapping, value))


def is_stage_3(optimizer: Any) -> bool:
    """Return whether DeepSpeed's optimizer is a stage 3 optimizer."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def flat_weights(optimizer: Any) -> list[Tensor]:
    """Return the flat master weights that DeepSpeed's inner optimizer updates."""
    if is_stage_3(optimizer):
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def advance_step_count(optimizer: Any, num_steps: int) -> None:
    """Advance DeepSpeedCPUAdam 0.19.8 to a step, updating its beta powers one step at a time; 10 µs per step.

    When set directly to a later step, it recomputes the powers, and their last bit differs from that of an
    uninterrupted run.
    """
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    weight, gradient, exp_avg, exp_avg_sq = (torch.zeros(1) for _ in range(4))
    for step in range(1, num_steps + 1):
        optimizer.ds_opt_adam.adam_update(
            *(optimizer.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True),
            *(weight, gradient, exp_avg, exp_avg_sq),
        )


def _split_state(optimizer: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of per-element state, and what each flat partition of this rank keeps beside it."""
    base = optimizer.optimizer
    states: list[dict[str, Any]] = [base.state.get(flat) or {} for flat in flat_weights(optimizer)]
    first = next((state for state in states if state), {})
    names = [name for name, value in first.items() if getattr(value, "ndim", 0) > 0]
    of_flats = []
    for state in states:
        values = {name: value for name, value in state.items() if name not in names and value is not None}
        if type(base).__name__ == "DeepSpeedCPUAdam":  # counts steps in an int, torch's Adam in a tensor
            values = {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}  # 0-dim
        of_flats.append(
            {name: value.float().cpu() if isinstance(value, Tensor) else value for name, value in values.items()}
        )
    return names, of_flats


def _read_top(optimizer: Any) -> dict[str, Any]:
    """Return further keys of the optimizer's `state_dict`, of which torch's own has none."""
    base = optimizer.optimizer
    if getattr(type(base), "state_dict", torch.optim.Optimizer.state_dict) is torch.optim.Optimizer.state_dict:
        return {}
    groups, params = base.param_groups, [group["params"] for group in base.param_groups]
    flats = flat_weights(optimizer)
    if is_stage_3(optimizer):  # each is in its group only while it is stepped
        of_groups = [optimizer.sub_group_to_group_id[index] for index in range(len(flats))]
        for number, group in enumerate(groups):
            group["params"] = [flat for flat, own in zip(flats, of_groups, strict=True) if own == number]
    try:
        return {key: value for key, value in base.state_dict().items() if key not in _OF_TORCH}
    finally:
        for group, own_params in zip(groups, params, strict=True):
            group["params"] = own_params


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float | str) or (isinstance(value, Tensor) and value.ndim == 0)


def _is_per_element(value: Any) -> bool:
    return isinstance(value, SavedTensor) and len(value.shape) > 0


def _read_scalars(optimizer: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return per-parameter state, such as `step`, in the form that the engine's optimizer needs."""
    base = optimizer.optimizer
    scalars = {
        name: value.read() if isinstance(value, SavedTensor) else value
        for name, value in saved.items()
        if not _is_per_element(value)
    }
    if type(base).__name__ == "DeepSpeedCPUAdam":  # counts steps in an int
        advance_step_count(base, int(scalars["step"]))
        return {name: int(value) for name, value in scalars.items()}
    fused = base.param_groups[0].get("fused")  # a fused optimizer keeps its step count on the device
    device = flat_weights(optimizer)[0].device if fused else "cpu"
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in scalars.items()}


def _link(optimizer: Any) -> None:
    """Link each parameter to its optimizer state.

    DeepSpeed 0.19.8 links them once, when only the first group has state, leaving out parameters of later groups.
    """
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _part(parameter: Any, name: str | None, *, writes_unsharded: bool) -> Part | None:
    """Return this rank's shard of a parameter at stages 1 and 2, a range of the flattened parameter.

    Args:
        parameter: Parameter of the module.
        name: Name of the optimizer state; None selects the master weights.
        writes_unsharded: Whether this rank writes frozen parameters, which every rank holds.
    """
    if not hasattr(parameter, "_hp_mapping"):  # frozen: no master copy
        return unsharded_part(parameter) if writes_unsharded else None
    mapping = parameter._hp_mapping
    if mapping is None:  # the parameter is entirely in other ranks' partitions
        return None
    fragment = mapping.get_hp_fragment(name)  # [elements on this rank]
    start = mapping.lp_fragment_address.start
    return Part(tensor=fragment.detach(), offsets=(start,), unsharded_shape=parameter.shape)


def _write(parameter: Any, saved: SavedTensor) -> None:
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:
        mapping.get_hp_fragment().copy_(_read_fragment(mapping, saved))
    # also write the low-precision weights: DeepSpeed refreshes them from the master weights only after a step
    parameter.data.copy_(saved.read())


def _read_fragment(mapping: Any, saved: SavedTensor) -> Tensor:
    """Read this rank's elements at stages 1 and 2 as a flat tensor."""
    address = mapping.lp_fragment_address
    return saved.read_range(address.start, address.start + address.numel)


def _stage_3_optimizer(parameters: Iterable[Any]) -> Any:
    """Return DeepSpeed's optimizer, to which parameters refer at stage 3; None at the other stages."""
    optimizers = (getattr(parameter, "_z3_optimizer", None) for parameter in parameters)
    return next((optimizer for optimizer in optimizers if optimizer is not None), None)


def _list_members(optimizer: Any) -> list[list[nn.Parameter]]:
    """Return the parameters of each group, which stage 3 splits into sub-groups."""
    if not is_stage_3(optimizer):
        return list(optimizer.bit16_groups)
    members: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    for index, sub_group in enumerate(optimizer.fp16_groups):
        members[optimizer.sub_group_to_group_id[index]] += sub_group
    return members


# Read and write ZeRO-3 shards one sub-group at a time; the other sub-groups may be on disk.

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
