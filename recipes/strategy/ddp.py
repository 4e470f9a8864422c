"""A whole model on every rank; gradients are averaged once per optimizer step, while the backward pass runs."""

from collections.abc import Sequence

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from recipes.checkpoint.parts import SavesTensors
from recipes.precision import Precision
from recipes.precision_plugin import lightning_plugin
from recipes.reachable_gradients import ReachableGradients


class DataParallel(ReachableGradients, SavesTensors, DDPStrategy):
    """Lightning's DDP strategy, answering the questions of `recipes.strategy.Engine`.

    Gradients are views of the communication buckets and stay so, zeroed in place, which saves their copy, 4 bytes
    a parameter. Inside an accumulation window Lightning suppresses the all-reduce. A static graph is not asked
    for: it serves reentrant activation checkpoints and unused parameters, and there are neither here. Running
    statistics are not broadcast at every forward pass; the task averages them over ranks where they are read.

    Args:
        devices: Of this node, one a rank.
        precision: Of weights and products.
        checkpoint_io: How checkpoints are written and read.
    """

    frees_gradients = False

    def __init__(
        self,
        *,
        devices: Sequence[torch.device],
        precision: Precision,
        checkpoint_io: CheckpointIO | None = None,
    ) -> None:
        super().__init__(
            checkpoint_io=checkpoint_io,
            precision_plugin=lightning_plugin(precision, devices[0]),
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )
