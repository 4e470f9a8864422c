"""Run a training step of a config on fake tensors, as rank 0 of any number of ranks, and record its operators.

The model, loss, activation checkpointing, FSDP2, clipping and optimizer are the real ones; tensors have no storage and
collectives do nothing. Other engines run as a single device here: `recipes.plan.memory` adds their buffers.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from recipes.activation_checkpoint import ActivationCheckpoint
from recipes.blocks import keep_blocks, list_blocks
from recipes.mesh import Mesh
from recipes.numerics.ema import average_weights
from recipes.numerics.nf4 import get_parts
from recipes.optimizer import DividesWork
from recipes.parallel.context import apply_context_parallel
from recipes.parallel.experts import apply_expert_parallel
from recipes.parallel.placement import local
from recipes.parallel.tensor import apply_tensor_parallel
from recipes.plan.activations import mark_host_copies
from recipes.plan.compiled import CompiledBlocks
from recipes.plan.fake_rank import (
    MeshGroups,
    autocast,
    default_dtype,
    even_loads,
    fake_ranks,
    gpu_operators,
    make_groups,
    no_truncated_draws,
    real_meshes,
)
from recipes.plan.trace import FROZEN, GRADIENTS, OPTIMIZER, WEIGHTS, Op, StepTracer
from recipes.precision import Precision
from recipes.strategy.sharding import ExpertSharding, ShardPolicy, get_data_axes, shard_model
from recipes.torch_internals import FakeTensorMode, tree_leaves

Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """FSDP2 sharding, over the ranks of `Step.mesh` that read different tokens.

    Attributes:
        cpu_offload: Keep shards in host memory.
        syncs_each_micro_batch: Reduce gradients after every backward pass, not once per step.
        reshard_after_forward: Gather each block again for its backward pass.
        reduce_dtype: Dtype in which gradients are summed over ranks.
    """

    cpu_offload: bool = False
    syncs_each_micro_batch: bool = True
    reshard_after_forward: bool = True
    reduce_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class Step:
    """Everything that determines a training step.

    Attributes:
        make_model: Returns the model, on the default device.
        objective: (model, batch) -> loss.
        make_batch: Returns a micro-batch, on the current default device.
        make_optimizer: model -> optimizer.
        precision: Dtypes.
        activation_checkpoint: Recomputation of blocks.
        accumulates: Whether gradients of earlier micro-batches already exist.
        frees_gradients: Whether gradients are freed instead of zeroed before they are computed again.
        drops_gradients: Whether each gradient is removed as soon as it is complete, as in ZeRO 2 and 3.
        engine_steps: Whether an engine clips the gradients and steps the optimizer, as in ZeRO.
        ema_decay: Decay of the weight average; None: no averaging.
        mesh: Mesh of all ranks.
        sharding: FSDP2 sharding; None: each rank holds the full state.
        num_replicas: Ranks that hold the same weights and gradients, without FSDP2.
        on_gpu: Record a GPU's operators where they differ from a CPU's.
        is_compiled: Whether the blocks are compiled, and keep what the compiler saves.
        frozen_models: Return the frozen models that the objective asks, by name, on the default device.
        hold_frozen: Called with these models before the objective.
        forward_only: Return the models without storage whose forward pass alone is in a step, these among them.
        num_forward_passes: Forward passes over each micro-batch: two where the first one only finds features.
    """

    make_model: Callable[[], nn.Module]
    objective: Callable[[nn.Module, Batch], Tensor]
    make_batch: Callable[[], Batch]
    make_optimizer: Callable[..., torch.optim.Optimizer]
    precision: Precision
    activation_checkpoint: ActivationCheckpoint
    accumulates: bool
    frees_gradients: bool = True
    drops_gradients: bool = False
    engine_steps: bool = False
    ema_decay: float | None = None
    mesh: Mesh = field(default_factory=Mesh)
    sharding: Sharding | None = None
    num_replicas: int = 1
    on_gpu: bool = False
    is_compiled: bool = False
    frozen_models: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    hold_frozen: Callable[[dict[str, nn.Module]], None] = lambda models: None
    forward_only: Callable[[], list[nn.Module]] = list
    num_forward_passes: int = 1


def record_step(
    step: Step, *, blocks: Sequence[int] | None = None, keep_calls: bool = False, computes: bool = True
) -> list[Op]:
    """Return the operators of one step in order, as in a run that has already taken steps.

    Only one of several micro-batches is recorded: not the first, since it has no gradients to accumulate into.

    Args:
        step: Step to record.
        blocks: Indices of the blocks to keep; None: all.
        keep_calls: Keep the arguments of each operator.
        computes: Whether to run forward and backward; otherwise the model is only clipped and stepped.
    """
    needs_group = step.sharding is not None or step.num_replicas > 1 or step.mesh.model_size > 1
    with fake_ranks(step.mesh.world_size if needs_group else 0), contextlib.ExitStack() as fakes:
        groups = make_groups(step.mesh, shards=step.sharding is not None)
        fake: FakeTensorMode = fakes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        with real_meshes(), no_truncated_draws():
            model = build_model(step, blocks, groups)
            frozen = hold_frozen_models(step, groups)
        optimizer = step.make_optimizer(model)
        if isinstance(optimizer, DividesWork):
            optimizer.replicas = dist.group.WORLD if step.num_replicas > 1 else None
            optimizer.product_dtype = torch.bfloat16 if step.on_gpu else None
        if step.ema_decay is not None:
            average_weights(optimizer, decay=step.ema_decay, step=lambda: 0)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # creates its state
        if step.drops_gradients or (step.engine_steps and not step.accumulates):
            optimizer.zero_grad()
        tracer = StepTracer(keep_calls=keep_calls, dimensions=groups.dimensions())
        with tracer, mark_host_copies(tracer), gpu_operators(step.on_gpu), even_loads():
            for tensor in [*model.parameters(), *model.buffers()]:
                for part in get_parts(tensor):
                    tracer.add(part, category=WEIGHTS)
            for tensor in (tensor for each in frozen for tensor in (*each.parameters(), *each.buffers())):
                tracer.add(tensor, category=FROZEN)
            _mark(tracer, parameters, optimizer)
            _mark_blocks(model, tracer)
            compiled = CompiledBlocks(_list_compiled(step, model, blocks), tracer, fake, step.precision)
            if step.drops_gradients:
                for parameter in parameters:
                    drop = functools.partial(_drop_gradient, tracer)
                    parameter.register_post_accumulate_grad_hook(drop)
            if computes:
                _compute(step, model, optimizer, parameters, tracer)
            if not step.engine_steps:  # DeepSpeed clips and steps on its own partitions
                tracer.section = "clipping"
                clip(parameters)
                tracer.section = "optimizer"
                optimizer.step()
                _mark(tracer, parameters, optimizer)
        return compiled.replace_kept(tracer.ops(is_compiled=step.is_compiled))


def _compute(
    step: Step,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    tracer: StepTracer,
) -> None:
    tracer.section = "forward/embedding"
    batch = step.make_batch()
    with autocast(step.precision):
        loss = step.objective(model, batch)
    tracer.end_forward()
    if not step.accumulates:  # Lightning does so between the forward and the backward pass
        optimizer.zero_grad(set_to_none=step.frees_gradients)
    tracer.section = tracer.section.replace("forward", "backward")
    loss.backward()
    del loss, batch
    _mark(tracer, parameters, optimizer)


def _list_compiled(step: Step, model: nn.Module, blocks: Sequence[int] | None) -> dict[str, nn.Module]:
    """Return the blocks, by section, that keep something else because they are compiled.

    A recomputed block keeps its inputs in either mode. What is offloaded is planned as in eager mode: all of it leaves
    the device.
    """
    if not step.is_compiled or step.activation_checkpoint.offload:
        return {}
    kept = list_blocks(model)
    return {
        f"forward/block {position}": block
        for position, (index, block) in enumerate(zip(blocks or range(len(kept)), kept, strict=True))
        if not step.activation_checkpoint.recomputes(index)
    }


def _mark(tracer: StepTracer, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            tracer.add(parameter.grad, category=GRADIENTS)
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                tracer.add(value, category=OPTIMIZER)


@torch.no_grad()
def clip(parameters: list[nn.Parameter]) -> None:
    """Clip as on a GPU: one pass over this rank's gradients for the norm, one to scale them."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [local(grad) for grad in grads]
    norm = nn.utils.get_total_norm(shards, foreach=True)
    torch._foreach_mul_(shards, (1.0 / norm).clamp(max=1.0))


def _drop_gradient(tracer: StepTracer, parameter: Tensor) -> None:
    assert parameter.grad is not None
    tracer.add(parameter.grad, category=GRADIENTS)
    parameter.grad = None


def hold_frozen_models(step: Step, groups: MeshGroups) -> list[nn.Module]:
    """Build the frozen models as the strategy does, and give them to the objective.

    Args:
        step: Step to build for.
        groups: Process groups that shard them.
    """
    models: dict[str, nn.Module] = {}
    for name, make in step.frozen_models.items():
        with default_dtype(step.precision.param_dtype):
            model = make().requires_grad_(False)
        _distribute(step, model, groups, is_trained=False)
        models[name] = model.eval()
    step.hold_frozen(models)
    return [*models.values()]


def build_model(step: Step, blocks: Sequence[int] | None, groups: MeshGroups) -> nn.Module:
    """Build the model as the strategy does, e.g. `FSDP2Strategy.materialize`.

    Args:
        step: Step to build for.
        blocks: Indices of the blocks to keep; None: all.
        groups: Process groups that shard the model.
    """
    with default_dtype(step.precision.param_dtype):
        model = step.make_model()
    if step.activation_checkpoint.changes_blocks:
        step.activation_checkpoint.apply(list_blocks(model))
    if blocks is not None:
        keep_blocks(model, blocks)
    _distribute(step, model, groups)
    return model.train()


def _distribute(step: Step, model: nn.Module, groups: MeshGroups, *, is_trained: bool = True) -> None:
    """Shard a model in place over the ranks of a step."""
    mesh = groups.device_mesh
    if step.mesh.tensor > 1:
        assert mesh is not None
        apply_tensor_parallel(model, mesh["tensor"], sequence_parallel=step.mesh.sequence_parallel)
    if groups.context is not None:
        apply_context_parallel(model, groups.context)
    if step.sharding is not None and mesh is not None:
        policy = ShardPolicy(
            precision=step.precision,
            offload=CPUOffloadPolicy(pin_memory=False) if step.sharding.cpu_offload else OffloadPolicy(),
            reshard_after_forward=step.sharding.reshard_after_forward,
            reduce_dtype=step.sharding.reduce_dtype,
        )
        experts = None
        if groups.expert_mesh is not None:
            apply_expert_parallel(model, groups.expert_mesh["expert"])
            experts = ExpertSharding(mesh=get_data_axes(groups.expert_mesh), num_averaged=step.mesh.averaged_size)
        shard_model(
            model,
            mesh=get_data_axes(mesh),
            policy=policy,
            option="fsdp",
            experts=experts,
            is_trained=is_trained,
        )


def _mark_blocks(model: nn.Module, tracer: StepTracer) -> None:
    """Set the tracer's section to the running block, forward and backward."""
    blocks = list_blocks(model)

    def enter(name: str) -> None:
        direction = tracer.section.partition("/")[0]
        tracer.section = f"{direction}/{name}"

    def before(name: str, is_first: bool, module: nn.Module, inputs: Any) -> None:
        enter(name)
        if is_first:
            for tensor in tree_leaves(inputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: enter("embedding"))
                    break

    def after(name: str, is_last: bool, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: enter(name))
                break
        if is_last:
            enter("head")

    for index, block in enumerate(blocks):
        name = f"block {index}"
        # before FSDP2's own hooks, which gather the next block in either direction: that belongs to this one
        block.register_forward_pre_hook(functools.partial(before, name, index == 0), prepend=True)
        block.register_forward_hook(functools.partial(after, name, index == len(blocks) - 1), prepend=True)
