"""One process, one device. No communication; the norm before clipping costs one pass over the gradients."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from recipes.checkpoint.shards import ShardSavingMixin
from recipes.precision import Precision
from recipes.strategy.precision_plugin import lightning_plugin
from recipes.strategy.torch_native import TorchNativeMixin


class SingleDevice(TorchNativeMixin, ShardSavingMixin, SingleDeviceStrategy):
    """Lightning's single-device strategy, answering the questions of `recipes.strategy.Engine`.

    Args:
        devices: The one the model lives on.
        precision: Of weights and products.
        checkpoint_io: How checkpoints are written and read.
    """

    option: ClassVar[str] = "single"
    needs_process_group: ClassVar[bool] = False
    replicates_state: ClassVar[bool] = True

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
