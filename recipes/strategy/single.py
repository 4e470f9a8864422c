"""One process, one device. No communication; the norm before clipping costs one pass over the gradients."""

from collections.abc import Sequence

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from recipes.checkpoint.shards import SavesTensors
from recipes.precision import Precision
from recipes.strategy.precision_plugin import lightning_plugin
from recipes.strategy.torch_native import ReachableGradients


class SingleDevice(ReachableGradients, SavesTensors, SingleDeviceStrategy):
    """Lightning's single-device strategy, answering the questions of `recipes.strategy.Engine`.

    Args:
        devices: The one the model lives on.
        precision: Of weights and products.
        checkpoint_io: How checkpoints are written and read.
    """

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
