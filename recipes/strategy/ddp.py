"""DDP: the full model on every rank; gradients are averaged once per optimizer step, during the backward pass."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from recipes.checkpoint.shards import ShardSavingMixin
from recipes.engine import implements_engine
from recipes.mesh import Mesh
from recipes.numerics.nf4 import list_nf4
from recipes.optimizer import DividesWork
from recipes.parallel.context import apply_context_parallel
from recipes.precision import Precision
from recipes.strategy.precision_plugin import to_lightning_plugin
from recipes.strategy.torch_native import TorchNativeMixin


@implements_engine
class DDP(TorchNativeMixin, ShardSavingMixin, DDPStrategy):
    """Lightning's DDP strategy as a `recipes.engine.Engine`.

    Gradients are views of the communication buckets, zeroed in place, which saves a copy of 4 bytes per parameter.
    Inside an accumulation window Lightning suppresses the all-reduce. `static_graph` stays off: it serves reentrant
    activation checkpoints and unused parameters, and this project has neither. Batch norm statistics are not broadcast
    at every forward pass; the task averages them over ranks where they are read.

    Args:
        devices: Devices of this node, one per rank.
        precision: Dtypes of weights and matrix products.
        checkpoint_io: Writes and reads checkpoints; None uses Lightning's.
        mesh: Mesh of replicas and context-parallel ranks; None makes every rank data-parallel.
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
        mesh: Mesh | None = None,
    ) -> None:
        self._configured_mesh = mesh
        super().__init__(
            checkpoint_io=checkpoint_io,
            precision_plugin=to_lightning_plugin(precision, devices[0]),
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.connect_ranks()

    @override
    def materialize(
        self, model: nn.Module, initialize: Callable[[nn.Module], None], *, is_trained: bool = True
    ) -> nn.Module:
        if self.groups.context is not None:
            apply_context_parallel(model, self.groups.context)
        return super().materialize(model, initialize, is_trained=is_trained)

    def place_own(self, module: lightning.LightningModule, blocks: Sequence[nn.Module]) -> None:
        """Prepare for a LightningModule of one's own, before it is wrapped."""
        # a step of one of several optimizers uses some of the parameters only
        if not module.automatic_optimization:
            self._ddp_kwargs["find_unused_parameters"] = True

    @override
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer; distribute its work over the replicas if it supports that."""
        if isinstance(optimizer, DividesWork):
            optimizer.replicas = dist.group.WORLD
        return super().prepare_optimizer(optimizer)

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        """Wrap the model on the training stream.

        Lightning 2.6.6 wraps it on a stream of its own, for CUDA graphs of the whole network (#21567, fixed after
        2.6.6 by #21746). The nodes that accumulate gradients then belong to that stream: torch 2.13 warns on every
        rank and synchronizes the streams for every parameter in every backward pass.
        """
        in_nf4 = [name for name, _ in list_nf4(model)]
        if in_nf4:
            # DDP would broadcast them from rank 0, for which NF4Tensor (torchao 0.18) has no operator; they depend only
            # on the seed or on files, so all ranks have the same
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, in_nf4)
        return DistributedDataParallel(module=model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    @override
    def setup(self, trainer: lightning.Trainer) -> None:
        """Start DDP and settle its bucket layout before the first real backward pass.

        torch 2.13 rebuilds its buckets after the first backward pass of a process. With three ranks or more this
        changes the order of summation, so a resumed run would differ in the last bits from an uninterrupted one.
        A backward pass with zero gradients, in the order of a real one, triggers the rebuild here.
        """
        super().setup(trainer)
        if trainer.state.fn != "fit" or self._ddp_kwargs.get("find_unused_parameters"):  # with which it rebuilds none
            return
        assert isinstance(self.model, DistributedDataParallel)
        reducer = self.model.reducer
        # as a forward pass through DDP does; the model itself need not run
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        trained = [p for p in self.model.parameters() if p.requires_grad]
        # depends on every parameter, with a gradient of zero
        zero = torch.stack([parameter.sum() for parameter in trained]).sum() * 0.0  # 0-dim
        zero.backward()
        assert reducer._rebuild_buckets(), "the first real forward pass would rebuild them"
        self.model.zero_grad(set_to_none=False)
