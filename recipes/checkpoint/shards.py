"""Collect the shards that this rank writes, and load its shards of a saved state, without collectives.

`DTensor` is FSDP2's sharded tensor; every other tensor is held unsharded by every rank.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.checkpoint.layout import merge_optimizer_values, select_state
from recipes.checkpoint.saved_tensor import SavedTensor
from recipes.checkpoint.shard_file import Part
from recipes.lightning_internals import unwrap_optimizer
from recipes.numerics.ema import NAME as EMA_KEY
from recipes.parallel.placement import RowOrder, find_box, find_row_orders, local
from recipes.parallel.stages import is_copy
from recipes.precision.float8 import unwrap


class PerRankSavingMixin:
    """Makes every rank of a strategy save and load its own shards."""

    checkpoint_io: CheckpointIO

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save from every rank; Lightning's own method writes only on rank 0."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the state with tensors still on disk."""
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path)
        return checkpoint

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True makes Lightning pass the saved state to `load_optimizer_state_dict`."""
        return True

    def read_optimizer_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the saved optimizer state of this rank's parameters; hand the values of groups to the task.

        Raises:
            ConfigError: Ranks of another mesh keep different values of one parameter.
            ValueError: A tensor has a dtype that the optimizer never saves.
        """
        strategy: Any = self
        task = strategy.lightning_module
        values = merge_optimizer_values(
            checkpoint, rank=strategy.global_rank, is_same_mesh=task.is_of_same_mesh(checkpoint)
        )
        task.take_group_values(values["groups"])
        names: list[str] = checkpoint["parameters"]
        optimizer = checkpoint["optimizer_states"][0]  # of several optimizers joined
        if task.has_known_state:
            check_dtypes(optimizer["state"], names, checkpoint["state_dict"])
        state = {
            index: optimizer["state"].get(index, {}) | values["parameters"].get(name, {})
            for index, name in enumerate(names)
            if index in optimizer["state"] or name in values["parameters"]
        }
        saved = select_state(optimizer | {"state": state}, names, task.optimized_parameters, checkpoint["tied"])
        merged: dict[str, Any] = saved | values["top"] | {"state": saved["state"] | values["others"]}
        return merged


def check_dtypes(
    state: Mapping[int, Mapping[str, Any]], names: Sequence[str], weights: Mapping[str, SavedTensor]
) -> None:
    """Check that saved optimizer state is float32 or has the dtype of its weight: torch would cast any other.

    Args:
        state: Saved state by index of the parameter and key.
        names: Names of the parameters.
        weights: Saved weights by name. This run's may have another dtype, as a run may resume in another precision.

    Raises:
        ValueError: A tensor has another dtype.
    """
    for index, values in state.items():
        own = weights[names[index]].dtype
        for key, value in values.items():
            if isinstance(value, SavedTensor) and value.dtype not in ("F32", own):
                expected = own if own == "F32" else f"F32 or {own}"
                raise ValueError(f"{key} of {names[index]} is {value.dtype} in it, not {expected}")


class ShardSavingMixin(PerRankSavingMixin):
    """Saving for strategies with torch's own tensors and optimizers, unsharded or sharded by rows."""

    lightning_module: Any
    optimizers: list[torch.optim.Optimizer]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's shards of the module."""
        # buffers, such as batch-norm statistics, change in the next forward pass: they are not constant
        constant = {name for name, _ in self.lightning_module.named_parameters()}
        state: Mapping[str, Tensor] = self.lightning_module.state_dict(keep_vars=True)
        orders = find_row_orders(self.lightning_module)
        return get_shards(
            {name: tensor for name, tensor in state.items() if not is_copy(tensor)},
            constant=constant,
            writes_unsharded=self._ranks.writes_unsharded,
            row_orders={name: orders[id(tensor)] for name, tensor in state.items() if id(tensor) in orders},
        )

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what this rank saves of the optimizer state, keyed as torch's `state_dict`.

        State of a replicated parameter is the same on all its ranks, so one of them saves it. State of a sharded
        parameter belongs to its rank, unless the optimizer names it in `replicated_state` or it is torch's `step`.
        """
        inner = unwrap_optimizer(optimizer)
        saved: dict[str, Any] = inner.state_dict()
        orders = find_row_orders(self.lightning_module)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        replicated = {*(("step",) if is_torchs(inner) else ()), *getattr(inner, "replicated_state", ())}
        writes_unsharded = self._ranks.writes_unsharded
        state: dict[Any, Any] = {}
        for index, values in saved["state"].items():
            if not isinstance(index, int):  # of no parameter
                state[index] = values
                continue
            if is_copy(parameters[index]):
                continue
            is_sharded = isinstance(parameters[index], DTensor)
            tensors = {
                key: value
                for key, value in values.items()
                if isinstance(value, Tensor) and (not is_sharded or key in replicated or isinstance(value, DTensor))
            }
            others = {key: value for key, value in values.items() if key not in tensors}
            order = orders.get(id(parameters[index]))
            shards = get_shards(
                tensors,
                constant=tensors,
                writes_unsharded=writes_unsharded,
                row_orders={} if order is None else dict.fromkeys(tensors, order),
            )
            state[index] = shards | (others if is_sharded or writes_unsharded else {})
        return saved | {"state": state}

    @property
    def _ranks(self) -> Any:
        return self  # typed as the strategy, whose `MeshRanksMixin` knows the placement of tensors

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load the module, or this rank's shards."""
        load_module(self.lightning_module, checkpoint["state_dict"])

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizer state of this rank's parameters, of several optimizers where the module has them."""
        orders = find_row_orders(self.lightning_module)
        saved = self.read_optimizer_state(checkpoint)
        first = 0  # index of the optimizer's first parameter among those of all
        for optimizer in self.optimizers:
            last = first + sum(len(group["params"]) for group in optimizer.param_groups)
            state = {index - first: saved["state"][index] for index in range(first, last) if index in saved["state"]}
            others = {key: values for key, values in saved["state"].items() if not isinstance(key, int)}
            load_optimizer(optimizer, saved | {"state": state | others}, orders)
            first = last


def get_shards(
    state: Mapping[str, Tensor],
    *,
    constant: Collection[str],
    writes_unsharded: bool,
    row_orders: Mapping[str, RowOrder],
) -> dict[str, Part]:
    """Return the shards that this rank writes, by name.

    Args:
        state: Tensors by name.
        constant: Names of tensors that only an optimizer step changes.
        writes_unsharded: Whether this rank writes tensors that every rank holds unsharded.
        row_orders: Row orders of tensors whose rows ranks hold in a different order than files.
    """
    parts = {}
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            part = _shard(tensor, row_orders.get(name))
        elif writes_unsharded:
            part = unsharded_part(tensor, constant=name in constant)
        else:
            part = None
        if part is not None:
            parts[name] = part
    return parts


def unsharded_part(tensor: Tensor, *, constant: bool = True) -> Part:
    """Return a shard that covers a whole tensor."""
    offsets = (0,) * tensor.ndim
    tensor = tensor.detach()
    return Part(tensor=tensor, offsets=offsets, unsharded_shape=tensor.shape, constant=constant)


def _shard(tensor: DTensor, row_order: RowOrder | None) -> Part | None:
    """Return this rank's shard; None if it is empty or another replica writes it."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None, "every rank is in the mesh"
    local = unwrap(tensor.to_local().detach())  # [rows of this rank, ...]
    # of ranks with the same shard only the first writes it
    places = zip(coordinates, tensor.placements, strict=True)
    if any(coordinate and placement.is_replicate() for coordinate, placement in places) or local.numel() == 0:
        return None
    offsets, _ = find_box(tensor)
    rows = None if row_order is None else tuple(row_order.find(offsets[0], len(local)))
    return Part(tensor=local, offsets=offsets, unsharded_shape=tensor.shape, rows=rows)


@torch.no_grad()
def load_module(module: nn.Module, saved: Mapping[str, SavedTensor]) -> None:
    """Copy saved tensors into a module or this rank's shards; the checkpoint may omit frozen parameters."""
    frozen = {
        name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad
    }
    orders = find_row_orders(module)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in frozen and name not in saved:
            continue
        shard = local(tensor)
        values = _read_local(tensor, saved[name], orders.get(id(tensor)))
        are_floating = values.is_floating_point() and shard.is_floating_point()  # of another precision
        if values.dtype != shard.dtype and not are_floating:
            raise ValueError(f"{name} is {values.dtype} in it, and {shard.dtype} in the model")
        shard.copy_(values.view(shard.shape))


@torch.no_grad()
def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], row_orders: Mapping[int, RowOrder]) -> None:
    """Load saved optimizer state in the dtype of the weights; keeps this run's hyper-parameters.

    Args:
        optimizer: Optimizer of unsharded parameters or of shards.
        saved: Saved state, keyed as torch's `state_dict`, with `SavedTensor` for tensors.
        row_orders: Row orders, by `id`, of parameters whose rows ranks hold in a different order than files.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {
            key: _read_like(parameters[index], value, row_orders.get(id(parameters[index])))
            for key, value in values.items()
        }
        for index, values in saved["state"].items()
        if isinstance(index, int)
    }
    others = {key: values for key, values in saved["state"].items() if key not in state}  # of no parameter
    # use this run's hyper-parameters: `fused` determines on which device torch puts a saved step
    inner: Any = unwrap_optimizer(optimizer)
    groups = inner.state_dict()["param_groups"]
    in_float32 = {EMA_KEY, *getattr(inner, "float32_state", ())}
    inner.load_state_dict(saved | {"state": state | others, "param_groups": groups})
    for index, values in state.items():
        parameter = parameters[index]
        loaded = inner.state[parameter]
        for key, value in values.items():
            is_of_rank = isinstance(parameter, DTensor) and not isinstance(saved["state"][index][key], SavedTensor)
            if is_of_rank or not isinstance(value, Tensor):
                # torch 2.13 casts tensors, and rebuilds what can be iterated over: a string becomes that of a generator
                loaded[key] = _to_device(value, parameter.device)
            # torch casts all state to the parameter's dtype, as needed to resume in another precision; but this would
            # round a float32 average of bfloat16 weights, and any state that an optimizer keeps in float32
            elif key in in_float32 and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is one of torch's own, whose `step` counts the steps of all ranks."""
    return type(optimizer).__module__.startswith("torch.optim")


def _to_device(value: Any, device: torch.device) -> Any:
    """Return plain data with the tensors in it on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _to_device(entry, device) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_device(entry, device) for entry in value)
    return value


def _read_like(parameter: Tensor, saved: Any, row_order: RowOrder | None) -> Any:
    """Read optimizer state in its own dtype, sharded like its parameter; return other values unchanged."""
    if not isinstance(saved, SavedTensor):
        return saved
    if not (isinstance(parameter, DTensor) and saved.shape == parameter.shape):
        return saved.read()
    values = _read_local(parameter, saved, row_order)  # [elements of this rank], in host memory
    # on the device of the parameter's shard: `DTensor.from_local` would move it to the mesh's device, and a run with
    # offloaded weights would fill its GPU with optimizer state
    state: Any = torch.empty_like(parameter.detach(), dtype=values.dtype)
    shard = state.to_local()
    shard.copy_(values.view(shard.shape))
    return state


def _read_local(tensor: Tensor, saved: SavedTensor, row_order: RowOrder | None) -> Tensor:
    """Read this rank's elements of a tensor, flat."""
    if not isinstance(tensor, DTensor):
        return saved.read().reshape(-1)
    offsets, shape = find_box(tensor)
    if row_order is None or 0 in shape:
        return saved.read_box(offsets, shape).reshape(-1)
    pieces = row_order.find(offsets[0], shape[0])
    return torch.cat([saved.read_box((first, *offsets[1:]), (n, *shape[1:])).reshape(-1) for first, n in pieces])
