"""A whole model on every rank; gradients are averaged once per optimizer step, while the backward pass runs."""

from collections.abc import Sequence
from typing import ClassVar

import lightning.pytorch as lightning
import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from recipes.checkpoint.shards import ShardSavingMixin
from recipes.precision import Precision
from recipes.strategy.precision_plugin import lightning_plugin
from recipes.strategy.torch_native import TorchNativeMixin


class DDP(TorchNativeMixin, ShardSavingMixin, DDPStrategy):
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

    option: ClassVar[str] = "ddp"
    replicates_state: ClassVar[bool] = True
    # Lightning 2.6 converts batch norms under DDP and FSDP1 only
    syncs_batch_norm: ClassVar[bool] = True

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

    def setup(self, trainer: lightning.Trainer) -> None:
        """Start DDP, and give it the buckets it keeps.

        torch 2.13 lays its buckets out anew after the first backward pass of a process. With three ranks or more
        that adds the gradients in another order, so that a resumed run would not have the bits of one that was
        never interrupted. A backward pass of zeros, in the order of a real one, is the first instead.
        """
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        assert isinstance(self.model, DistributedDataParallel)
        reducer = self.model.reducer
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        trained = [p for p in self.model.parameters() if p.requires_grad]
        zero = torch.stack([parameter.sum() for parameter in trained]).sum() * 0.0
        zero.backward()  # type: ignore[no-untyped-call]
        assert reducer._rebuild_buckets(), "what the first real forward pass would have done"
        self.model.zero_grad(set_to_none=False)
