"""States with every tensor whole, whatever a rank holds of it: the same file from every strategy, for every other.

Costs one all-gather a tensor, and on rank 0 the host memory of the whole state.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class WholeCheckpoint:
    """For a strategy of parts: rank 0 writes what the strategy has gathered, every rank reads the file."""

    checkpoint_io: CheckpointIO
    is_global_zero: bool

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Rank 0 writes; the Trainer waits for it on every rank."""
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Every rank reads whole tensors; `load_model_state_dict` keeps this rank's part of them."""
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path)
        return checkpoint

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands the saved state back to `load_optimizer_state_dict`."""
        return True


@torch.no_grad()
def gather(state: Any, *, keep: bool) -> Any:
    """Replace every sharded tensor in nested dicts and lists by the whole one, on the host.

    A collective: every rank calls it with the same names in the same order.

    Args:
        state: Of a model or an optimizer.
        keep: Whether this rank wants the tensors; False: {} in the end, and little memory on the way.
    """
    whole = _gather(state, keep=keep)
    return whole if keep else {}


def _gather(value: Any, *, keep: bool) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return value.detach().cpu() if keep else None
    if isinstance(value, Mapping):
        return {key: _gather(item, keep=keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_gather(item, keep=keep) for item in value)
    return value


@torch.no_grad()
def load_model(module: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into a model, or into this rank's shards of it. No collective."""
    for name, tensor in module.state_dict().items():
        tensor.copy_(_like(tensor, whole[name]))


@torch.no_grad()
def load_optimizer(optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
    """Give an optimizer of shards the state of an optimizer of whole parameters. No collective."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {
            name: _like(parameters[index], value) if _is_moment(value) else value
            for name, value in of_parameter.items()
        }
        for index, of_parameter in whole["state"].items()
    }
    optimizer.load_state_dict(whole | {"state": state})


def _is_moment(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _like(tensor: Tensor, whole: Tensor) -> Tensor:
    """`whole`, cut and placed as `tensor` is; the dtype stays."""
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(
        whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
    )
