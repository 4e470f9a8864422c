"""Single-device strategy: no communication; the norm before clipping costs one read of the gradients."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from recipes.checkpoint.shards import ShardSavingMixin
from recipes.engine import implements_engine
from recipes.mesh import Mesh
from recipes.precision import Precision
from recipes.strategy.precision_plugin import to_lightning_plugin
from recipes.strategy.torch_native import TorchNativeMixin


@implements_engine
class SingleDevice(TorchNativeMixin, ShardSavingMixin, SingleDeviceStrategy):
    """Lightning's single-device strategy as a `recipes.engine.Engine`.

    Args:
        devices: List with the single device to train on.
        precision: Dtypes of weights and matrix products.
        checkpoint_io: Writes and reads checkpoints; None uses Lightning's.
        mesh: Mesh of one rank.
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
        mesh: Mesh | None = None,
    ) -> None:
        assert mesh is None or mesh.world_size == 1, mesh
        [device] = devices
        super().__init__(
            device=device,
            checkpoint_io=checkpoint_io,
            precision_plugin=to_lightning_plugin(precision, device),
        )
