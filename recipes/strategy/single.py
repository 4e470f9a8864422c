"""One process, one device. No communication; the norm before clipping costs one pass over the gradients."""

from collections.abc import Callable, Iterable, Sequence

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from recipes.gradients import clip_gradients
from recipes.precision import Precision
from recipes.precision_plugin import lightning_plugin, loss_scale_of, num_overflows_of


class SingleDevice(SingleDeviceStrategy):
    """Lightning's single-device strategy, answering the questions of `recipes.strategy.Engine`.

    Args:
        devices: The one the model lives on.
        precision: Of weights and products.
        checkpoint_io: How checkpoints are written and read.
    """

    grad_norm: Tensor | None = None
    frees_gradients = True

    def __init__(
        self,
        *,
        devices: Sequence[torch.device],
        precision: Precision,
        checkpoint_io: CheckpointIO | None = None,
    ) -> None:
        [device] = devices
        super().__init__(
            device=device,
            checkpoint_io=checkpoint_io,
            precision_plugin=lightning_plugin(precision, device),
        )

    def place(self, model: nn.Module, initialize: Callable[[nn.Module], None]) -> None:
        """The device holds the whole model."""
        model.to_empty(device=self.root_device)
        initialize(model)

    def own_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer as it is."""
        return optimizer

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], *, max_norm: float | None, max_value: float | None
    ) -> None:
        """Clip in place, where asked, and keep the norm before."""
        self.grad_norm = clip_gradients(parameters, max_norm=max_norm, max_value=max_value)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """One rank: the value itself."""
        return value

    @property
    def current_loss_scale(self) -> float | None:
        """What the loss is multiplied by; None without a loss scaler."""
        return loss_scale_of(self.precision_plugin)

    @property
    def num_overflows(self) -> int:
        """Optimizer steps skipped because a gradient was not finite."""
        return num_overflows_of(self.precision_plugin)
