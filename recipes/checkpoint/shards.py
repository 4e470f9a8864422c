"""What this rank writes of a state, and how it takes its part of a saved one. Views and copies, no collective."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from recipes.checkpoint.shard_file import Part, SavedTensor, flat_start


class PerRankSavingMixin:
    """For every strategy: each rank hands over what it holds, and takes back what it keeps."""

    checkpoint_io: CheckpointIO

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Called on every rank, where Lightning's own writes on rank 0 alone."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """State whose tensors are still on disk."""
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path)
        return checkpoint

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands the saved state back to `load_optimizer_state_dict`."""
        return True


class ShardSavingMixin(PerRankSavingMixin):
    """For strategies whose weights and moments are torch's own tensors, whole or sharded by rows."""

    is_global_zero: bool
    lightning_module: Any
    optimizers: list[torch.optim.Optimizer]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's parts of the module."""
        constant = {name for name, _ in self.lightning_module.named_parameters()}
        state: Mapping[str, Tensor] = self.lightning_module.state_dict()
        return get_shards(state, constant=constant, writes_whole=self.is_global_zero)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """This rank's parts of the moments, keyed as torch's `state_dict` is."""
        saved = getattr(optimizer, "_optimizer", optimizer).state_dict()
        state = {
            index: _others(of_parameter)
            | get_shards(
                {key: value for key, value in of_parameter.items() if isinstance(value, Tensor)},
                constant=of_parameter,
                writes_whole=self.is_global_zero,
            )
            for index, of_parameter in saved["state"].items()
        }
        return {"state": state, "param_groups": saved["param_groups"]}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Into the tensors, or this rank's shards, of the module."""
        load_module(self.lightning_module, checkpoint["state_dict"])

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Into the state of this rank's parameters."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer(optimizer, saved)


def get_shards(
    state: Mapping[str, Tensor], *, constant: Collection[str], writes_whole: bool
) -> dict[str, Part]:
    """The parts of some tensors that this rank writes.

    Args:
        state: Tensors by name.
        constant: Names of those that only an optimizer step changes.
        writes_whole: Whether this rank writes tensors that every rank holds whole.
    """
    parts = {}
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            part = _shard(tensor)
        elif writes_whole:
            part = unsharded_part(tensor, constant=name in constant)
        else:
            part = None
        if part is not None:
            parts[name] = part
    return parts


def unsharded_part(tensor: Tensor, *, constant: bool = True) -> Part:
    """A tensor that one rank writes whole."""
    offsets = (0,) * tensor.ndim
    tensor = tensor.detach()
    return Part(tensor=tensor, offsets=offsets, unsharded_shape=tensor.shape, constant=constant)


def _shard(tensor: DTensor) -> Part | None:
    """This rank's rows; None where it has none, or another replica writes them."""
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None, "every rank is in the mesh"
    replicas = [
        place
        for place, placement in zip(coordinates, tensor.placements, strict=True)
        if placement.is_replicate()
    ]
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    local = tensor.to_local().detach()
    if any(replicas) or local.numel() == 0:
        return None
    return Part(tensor=local, offsets=tuple(offsets), unsharded_shape=tensor.shape)


@torch.no_grad()
def load_module(module: nn.Module, saved: Mapping[str, SavedTensor]) -> None:
    """Copy saved tensors into a module, or into this rank's shards of it."""
    for name, tensor in module.state_dict().items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.copy_(_local_part(tensor, saved[name]).view(local.shape))


@torch.no_grad()
def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give an optimizer, of whole parameters or of shards, its saved state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {key: _like(parameters[index], value) for key, value in of_parameter.items()}
        for index, of_parameter in saved["state"].items()
    }
    # with the hyper-parameters of this run: `fused` decides on which device torch puts a saved step
    groups = [
        group | {"params": of_saved["params"]}
        for group, of_saved in zip(optimizer.param_groups, saved["param_groups"], strict=True)
    ]
    whole = saved | {"state": state, "param_groups": groups}
    own: Any = getattr(optimizer, "_optimizer", optimizer)
    own.load_state_dict(whole)
    for index, of_parameter in state.items():
        own_state = own.state[parameters[index]]
        for key, value in of_parameter.items():
            # torch gives every moment its parameter's type: an average in float32 of bfloat16 weights keeps its own
            if isinstance(value, Tensor) and own_state[key].dtype != value.dtype:
                own_state[key] = value.to(own_state[key].device)


def _others(of_parameter: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in of_parameter.items() if not isinstance(value, Tensor)}


def _like(parameter: Tensor, saved: Any) -> Any:
    """A moment, cut and placed as its parameter is; the dtype stays."""
    if not isinstance(saved, SavedTensor):
        return saved
    if not (isinstance(parameter, DTensor) and saved.shape == parameter.shape):
        return saved.whole()
    local = parameter.to_local()
    moment = _local_part(parameter, saved).view(local.shape).to(local.device)
    return DTensor.from_local(
        moment,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _local_part(tensor: Tensor, saved: SavedTensor) -> Tensor:
    """The elements that this rank holds, flat."""
    if not isinstance(tensor, DTensor):
        return saved.whole().reshape(-1)
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    num_elements = tensor.to_local().numel()
    start = flat_start(tuple(offsets), tensor.shape) if num_elements else 0
    return saved.part(start, start + num_elements)
