"""FSDP2: each rank holds 1/N of weights, gradients and optimizer state; blocks are gathered only while in use."""

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal

import lightning.pytorch as lightning
import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from typing_extensions import override

from recipes.checkpoint.shards import ShardSavingMixin
from recipes.engine import implements_engine
from recipes.errors import ConfigError
from recipes.lightning_internals import set_up_mesh
from recipes.mesh import Mesh
from recipes.parallel.context import apply_context_parallel
from recipes.parallel.experts import apply_expert_parallel, make_expert_mesh
from recipes.parallel.schedule import PipelineSchedule
from recipes.parallel.stages import PipelineRanks, StagedModel, cut_stage, mark_copies, plan_stages
from recipes.parallel.tensor import apply_tensor_parallel, mark_row_orders
from recipes.precision import Precision
from recipes.strategy import get_blocks
from recipes.strategy.precision_plugin import to_lightning_plugin
from recipes.strategy.sharding import (
    ExpertSharding,
    ShardPolicy,
    count_gathered_bytes,
    get_data_axes,
    keep_gathered,
    list_uncalled,
    shard_children,
    shard_model,
)
from recipes.strategy.torch_native import TorchNativeMixin


@implements_engine
class FSDP2Strategy(TorchNativeMixin, ShardSavingMixin, ModelParallelStrategy):
    """FSDP2 on top of Lightning's model-parallel strategy, as a `recipes.engine.Engine`.

    Under mixed precision the matrices of a block are gathered in the low precision and everything else in float32;
    autocast works as on one device, so rounding does not depend on the number of ranks.

    Args:
        devices: Devices of this node, one per rank.
        precision: Dtypes of weights and matrix products.
        checkpoint_io: Writes and reads checkpoints; None uses Lightning's.
        mesh: Mesh of replicas, shards, and context-, tensor- and pipeline-parallel ranks; None gives every rank its own
            shard and samples.
        cpu_offload: Keep shards, gradients and optimizer state in host memory; the optimizer steps there.
        gradient_sync: `per_micro_batch` reduce-scatters after every backward pass. `per_step` does so once per
            optimizer step; until then each rank holds the gradients of the full model, 4 bytes per parameter.
        reshard_after_forward: Free the weights of a block after its forward pass and gather them again for the
            backward pass. False gathers once per micro-batch; each rank then holds the full model in between. Pipeline
            stages are gathered once per step in either case.
        reduce_dtype: Dtype in which gradients are summed over ranks; `bfloat16` halves the traffic under mixed
            precision but rounds each rank's gradients before the sum, unlike one device. bf16-true always uses it.
        gather_for_generation: `per_call` gathers the weights once for a batch of texts; each rank then holds the full
            model, in the compute dtype. `per_token` gathers each block for every token. `auto` is `per_call` where that
            fits into the free memory of all devices.
    """

    option: ClassVar[str] = "fsdp"
    shards_weights: ClassVar[bool] = True
    state_layout: ClassVar[str] = "fsdp"

    _roots: list[FSDPModule]  # one for each child of a LightningModule of one's own
    _expert_mesh: DeviceMesh | None = None

    def __init__(
        self,
        *,
        devices: Sequence[torch.device],
        precision: Precision,
        checkpoint_io: CheckpointIO | None = None,
        mesh: Mesh | None = None,
        cpu_offload: bool,
        gradient_sync: Literal["per_micro_batch", "per_step"],
        reshard_after_forward: bool,
        reduce_dtype: Literal["float32", "bfloat16"],
        gather_for_generation: Literal["auto", "per_call", "per_token"],
    ) -> None:
        self._configured_mesh = mesh
        on_gpu = devices[0].type == "cuda"
        super().__init__(
            save_distributed_checkpoint=False,
            # with NCCL alone the norm of offloaded gradients, a host tensor, could not be summed over ranks
            process_group_backend="cpu:gloo,cuda:nccl" if on_gpu and cpu_offload else None,
        )
        self.precision_plugin = to_lightning_plugin(precision, devices[0])
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io
        self._policy = ShardPolicy(
            precision=precision,
            offload=CPUOffloadPolicy(pin_memory=on_gpu) if cpu_offload else OffloadPolicy(),
            reshard_after_forward=reshard_after_forward,
            reduce_dtype=torch.bfloat16 if reduce_dtype == "bfloat16" else precision.reduce_dtype,
        )
        self._gradient_sync = gradient_sync
        self._gather_for_generation = gather_for_generation

    def mesh_shape(self) -> dict[str, int]:
        """Return the size of each device mesh axis: pipeline stages, replicas, shards, tensor parallelism.

        Context-parallel ranks shard the weights as data-parallel ranks do, so they count as shards.
        """
        mesh = self.mesh
        sizes = {"pipeline": mesh.pipeline, "replicate": mesh.replicate}
        sizes |= {"shard": mesh.shard * mesh.context, "tensor": mesh.tensor}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis == "shard"}

    @override
    def setup_environment(self) -> None:
        """Join the process group and lay out the mesh; Lightning's would always add an axis for tensor parallelism."""
        set_up_mesh(self, self.connect_ranks, self.mesh_shape)
        self._expert_mesh = make_expert_mesh(self.mesh, self.root_device.type)

    def materialize(
        self, model: nn.Module, initialize: Callable[[nn.Module], None], *, is_trained: bool = True
    ) -> nn.Module:
        """Shard block by block, then allocate and initialize each shard: no rank ever holds the full model."""
        get_blocks(model, self.option)  # reject a model without blocks before the mesh is needed
        if self.groups.pipeline is None:
            self._materialize_part(model, initialize, is_trained=is_trained)
            return model
        assert is_trained, "the config check rejects a pipeline beside a frozen model"
        plan = plan_stages(model, num_ranks=self.mesh.pipeline, schedule=self.mesh.pipeline_schedule)
        ranks = PipelineRanks(self.groups.pipeline, plan, self.root_device)
        is_read = any(getattr(model, name, None) is not None for name in ("pretrained", "first_weights"))
        whole = copy.deepcopy(model) if is_read else None  # without storage
        parts = {stage: cut_stage(model, plan, stage, whole=whole) for stage in ranks.own_stages}
        for part in parts.values():
            self._materialize_part(part, initialize)
        staged = StagedModel(parts, ranks)
        self.pipeline = PipelineSchedule(
            staged, num_micro_batches=self.num_micro_batches, dtype=self._policy.precision.param_dtype
        )
        return staged

    def _materialize_part(
        self, model: nn.Module, initialize: Callable[[nn.Module], None], *, is_trained: bool = True
    ) -> None:
        """Materialize a whole model, or one pipeline stage."""
        if self.mesh.tensor > 1:
            apply_tensor_parallel(model, self.device_mesh["tensor"], sequence_parallel=self.mesh.sequence_parallel)
        if self.groups.context is not None:
            apply_context_parallel(model, self.groups.context)
        experts = None
        if self._expert_mesh is not None:
            apply_expert_parallel(model, self._expert_mesh["expert"])
            experts = ExpertSharding(mesh=get_data_axes(self._expert_mesh), num_averaged=self.averaged_size)
        shard_model(
            model,
            mesh=get_data_axes(self.device_mesh),
            policy=self._get_policy(),
            option=self.option,
            experts=experts,
            is_trained=is_trained,
        )
        offloaded = isinstance(self._policy.offload, CPUOffloadPolicy)
        model.to_empty(device="cpu" if offloaded else self.root_device)
        if offloaded:
            # FSDP2 moves parameters to the device for a computation, but not buffers
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(self.root_device))
        mark_row_orders(model)
        mark_copies(model)
        initialize(model)
        assert isinstance(model, FSDPModule)
        if is_trained:
            self._roots = [model]

    def place_own(self, module: lightning.LightningModule, blocks: Sequence[nn.Module]) -> None:
        """Shard a LightningModule of one's own, which every rank has constructed whole, with equal weights.

        Its blocks are units, and so is what is left of each child: a step calls its children, and not itself. In the
        place of a list or dict of modules are its members.

        Raises:
            ConfigError: The module has parameters that no submodule with a forward has, or a mesh that only our models
                have.
        """
        uncalled = list_uncalled(module)
        if uncalled:
            raise ConfigError(
                f"strategy={self.option} task=lightning",
                f"{', '.join(uncalled)} belong to no submodule with a forward, which would gather them",
                "strategy=ddp, or these parameters in an nn.Module whose forward uses them",
            )
        self._roots = shard_children(
            module, blocks, mesh=get_data_axes(self.device_mesh), policy=self._get_policy(), device=self.root_device
        )

    def _get_policy(self) -> ShardPolicy:
        """Return the sharding policy; pipeline stages stay gathered for a whole step.

        Their schedule gathers and frees them (torch 2.13). A schedule that splits the backward pass finds weights
        through the module's parameters: it would find shards, and silently omit their gradients.
        """
        return self._policy if self.groups.pipeline is None else replace(self._policy, reshard_after_forward=False)

    @override
    @contextmanager
    def _hold_whole_weights(self) -> Iterator[bool]:
        # pipeline stages stay gathered, and need the other stages anyway
        if self.groups.pipeline is not None or not self._gathers_once(
            self._gather_for_generation, num_bytes=count_gathered_bytes(self._roots[0])
        ):
            yield False
            return
        with keep_gathered(self._roots[0]):
            yield True

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which samples of loaders of one's own this rank reads; Lightning's looks for an axis of its own mesh."""
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    @override
    def model_to_device(self) -> None:
        """Do nothing: `materialize` has already put every tensor on its device."""

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate without communication; Lightning enters this for every micro-batch but the last of a window."""
        if self._gradient_sync == "per_micro_batch":
            yield
            return
        for root in self._roots:
            root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            # also after an error, or a later backward pass would never reduce
            for root in self._roots:
                root.set_requires_gradient_sync(True)

    @override
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer for this rank's shards; disables `fused` in SGD, which torch 2.13 lacks for DTensors."""
        if isinstance(optimizer, torch.optim.SGD):
            for group in optimizer.param_groups:
                group["fused"] = False
        return super().prepare_optimizer(optimizer)


class HSDPStrategy(FSDP2Strategy):
    """FSDP2 within groups of ranks, replicas across them: gradients are reduced inside a group, then between groups.

    Without a configured number of shards, each node is one group (`recipes.config.ranks`).
    """

    option: ClassVar[str] = "hsdp"
    shards_within_node: ClassVar[bool] = True
