"""FSDP2: each rank keeps 1/N of weights, gradients and optimizer state; a block is whole only while it computes."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from recipes.checkpoint.shards import ShardSavingMixin
from recipes.precision import Precision
from recipes.strategy import get_blocks
from recipes.strategy.precision_plugin import lightning_plugin
from recipes.strategy.torch_native import TorchNativeMixin

# what autocast computes in the low precision: their weights may be gathered in it, no other parameter
_LOW_PRECISION = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class FSDP2Strategy(TorchNativeMixin, ShardSavingMixin, ModelParallelStrategy):
    """Lightning's model-parallel strategy as plain FSDP2, answering the questions of `recipes.strategy.Engine`.

    Under a mixed precision the matrices of a block travel in the low precision and all else in float32, and
    autocast chooses as on one device: the same roundings, whatever the number of ranks. Gradients are reduced
    in float32.

    Args:
        devices: Of this node, one a rank.
        precision: Of weights and products.
        checkpoint_io: How checkpoints are written and read.
        cpu_offload: Shards, gradients and optimizer state live in host memory; the optimizer steps there.
        gradient_sync: `per_micro_batch`: reduce-scatter after every backward pass. `per_step`: once per optimizer step;
            each rank holds the gradients of the whole model until then, 4 bytes a parameter.
    """

    option: ClassVar[str] = "fsdp"
    shards_weights: ClassVar[bool] = True

    _placed: FSDPModule

    def __init__(
        self,
        *,
        devices: Sequence[torch.device],
        precision: Precision,
        checkpoint_io: CheckpointIO | None = None,
        cpu_offload: bool,
        gradient_sync: Literal["per_micro_batch", "per_step"],
    ) -> None:
        on_gpu = devices[0].type == "cuda"
        super().__init__(
            save_distributed_checkpoint=False,
            # offloaded gradients are summed on the host, everything else on the device
            process_group_backend="cpu:gloo,cuda:nccl" if on_gpu and cpu_offload else None,
        )
        self.precision_plugin = lightning_plugin(precision, devices[0])
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io
        self._precision = precision
        self._offload: OffloadPolicy = (
            CPUOffloadPolicy(pin_memory=on_gpu) if cpu_offload else OffloadPolicy()
        )
        self._gradient_sync = gradient_sync

    def mesh_shape(self) -> dict[str, int]:
        """Axes of the device mesh: the last one shards, one before it replicates."""
        return {"shard": self.world_size}

    def setup_environment(self) -> None:
        """Lightning's own would lay out a mesh for tensor parallelism."""
        self._setup_distributed()
        shape = self.mesh_shape()
        self._device_mesh: DeviceMesh = init_device_mesh(
            self.root_device.type, tuple(shape.values()), mesh_dim_names=tuple(shape)
        )

    def place(self, model: nn.Module, initialize: Callable[[nn.Module], None]) -> None:
        """Shard block by block, then give each shard storage and weights: no rank ever holds the whole model."""
        *others, last = get_blocks(model, self.option)
        for block in others:
            self._shard_block(block, reshard_after_forward=True)
        # the backward pass begins with it: it would be gathered again at once
        self._shard_block(last, reshard_after_forward=False)
        self._shard([model], low_precision=False, reshard_after_forward=False)
        offloaded = isinstance(self._offload, CPUOffloadPolicy)
        model.to_empty(device="cpu" if offloaded else self.root_device)
        if offloaded:  # buffers stay where the products are made
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(self.root_device))
        initialize(model)
        assert isinstance(model, FSDPModule)
        self._placed = model

    def _shard_block(self, block: nn.Module, *, reshard_after_forward: bool) -> None:
        if self._precision.compute_dtype != self._precision.param_dtype:
            full = [module for module in block.modules() if _stays_in_full_precision(module)]
            if full:
                self._shard(full, low_precision=False, reshard_after_forward=reshard_after_forward)
        self._shard([block], low_precision=True, reshard_after_forward=reshard_after_forward)

    def _shard(
        self, modules: list[nn.Module], *, low_precision: bool, reshard_after_forward: bool
    ) -> None:
        """One group of parameters, gathered and reduced together."""
        precision = self._precision
        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute_dtype if low_precision else precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            cast_forward_inputs=False,  # autocast casts where it must
        )
        fully_shard(
            modules if len(modules) > 1 else modules[0],  # type: ignore[arg-type]
            mesh=self.device_mesh,
            mp_policy=policy,
            offload_policy=self._offload,
            reshard_after_forward=reshard_after_forward,
        )

    def model_to_device(self) -> None:
        """Nothing: `place` has put every tensor where it belongs."""

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning enters it for every micro-batch of a window but the last."""
        if self._gradient_sync == "per_micro_batch":
            yield
            return
        self._placed.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._placed.set_requires_gradient_sync(True)

    def own_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer as it is: it steps this rank's shards. torch 2.13 has no fused SGD for them."""
        if isinstance(optimizer, torch.optim.SGD):
            for group in optimizer.param_groups:
                group["fused"] = False
            optimizer._step_supports_amp_scaling = False
        return optimizer


class HSDPStrategy(FSDP2Strategy):
    """FSDP2 within groups of ranks, replicas across them: gradients are reduced inside a group, then between groups.

    Args:
        shard_size: Ranks that share one copy of the model; None: those of one node.
    """

    option: ClassVar[str] = "hsdp"

    def __init__(
        self, *, shard_size: Annotated[int, ">= 1"] | None, **fully_shard_arguments: Any
    ) -> None:
        super().__init__(**fully_shard_arguments)
        self._shard_size = shard_size

    def mesh_shape(self) -> dict[str, int]:
        """Replicas, then shards."""
        shard_size = self._shard_size or self.num_processes
        return {"replicate": self.world_size // shard_size, "shard": shard_size}


def _stays_in_full_precision(module: nn.Module) -> bool:
    has_own = next(module.parameters(recurse=False), None) is not None
    return has_own and not isinstance(module, _LOW_PRECISION)
