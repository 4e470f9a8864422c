"""One process, one device. No communication; the norm before clipping costs one pass over the gradients."""

from collections.abc import Iterable

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn


class SingleDevice(SingleDeviceStrategy):
    """Lightning's single-device strategy, answering the questions of `recipes.strategy.Engine`.

    Args:
        device: Where the model lives.
        checkpoint_io: How checkpoints are written and read.
    """

    def __init__(self, *, device: torch.device, checkpoint_io: CheckpointIO | None = None) -> None:
        super().__init__(device=device, checkpoint_io=checkpoint_io)

    def parallelize(self, model: nn.Module) -> nn.Module:
        """One device holds the whole model as it is."""
        return model

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], *, max_norm: float | None, max_value: float | None
    ) -> Tensor:
        """Clip in place, where asked; give the global L2 norm before clipping, a 0-dim tensor."""
        with_grad = [parameter for parameter in parameters if parameter.grad is not None]
        grads = [parameter.grad for parameter in with_grad if parameter.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
        if max_value is not None:
            nn.utils.clip_grad_value_(with_grad, max_value)
        return norm

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """One rank: the value itself."""
        return value
