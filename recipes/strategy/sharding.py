"""FSDP2 sharding units: which weights are gathered and reduced together, and in which dtype."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from recipes.blocks import list_units, named_blocks
from recipes.errors import ConfigError
from recipes.numerics.grouped_linear import GroupedLinear
from recipes.numerics.nf4 import list_nf4
from recipes.precision import Precision
from recipes.strategy import get_blocks
from recipes.torch_internals import FSDPMeshInfo, FSDPParamGroup, get_mesh_info

# modules that autocast runs in the low precision: only their weights may be gathered in it
_LOW_PRECISION = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, GroupedLinear)


@dataclass(frozen=True, kw_only=True)
class ShardPolicy:
    """Sharding policy for the parameters of a model.

    Attributes:
        precision: Dtypes of weights and matrix products.
        offload: Offload policy for the shards.
        reshard_after_forward: Free a block's weights after its forward pass and gather them again for the backward
            pass; False keeps the gathered model, in the compute dtype, from the forward to the backward pass.
        reduce_dtype: Dtype in which gradients are summed over ranks.
    """

    precision: Precision
    offload: OffloadPolicy
    reshard_after_forward: bool
    reduce_dtype: torch.dtype

    def mixed_precision(self, *, low: bool) -> MixedPrecisionPolicy:
        """Return FSDP2's policy for one group of parameters.

        Args:
            low: Whether to all-gather the weights in the compute dtype. Only correct for weights that autocast casts
                anyway (matrices): norms and embeddings would be rounded, unlike on one device.
        """
        return MixedPrecisionPolicy(
            param_dtype=self.precision.compute_dtype if low else self.precision.param_dtype,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=False,  # left to autocast; FSDP2 would also cast inputs of float32 modules
        )


@dataclass(frozen=True, kw_only=True)
class ExpertSharding:
    """Sharding of expert weights under expert parallelism: over the ranks that hold the same experts.

    Attributes:
        mesh: Mesh of these ranks; the last axis shards, an axis before it replicates.
        num_averaged: Number of ranks over whose tokens gradients are averaged; an expert sees tokens of all of them.
    """

    mesh: DeviceMesh
    num_averaged: int


def get_data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the submesh of the axes that replicate or shard the weights."""
    names = [name for name in mesh.mesh_dim_names or () if name in ("replicate", "shard", "expert_shard")]
    return mesh[tuple(names)]


def shard_model(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    policy: ShardPolicy,
    option: str,
    experts: ExpertSharding | None = None,
    is_trained: bool = True,
) -> None:
    """Shard a model in units that are gathered and reduced one by one.

    The units are each block, an untied embedding or head that is as large as a block, and everything else.

    Args:
        model: Not yet sharded, on any device.
        mesh: Mesh of the ranks; the last axis shards, an axis before it replicates.
        policy: Dtypes, offload and resharding.
        option: Name of the strategy's option, for error messages.
        experts: Sharding of expert weights; None without expert parallelism.
        is_trained: False for a model without a backward pass: every unit is freed after its forward pass.

    Raises:
        ConfigError: The model has no blocks, or the rows of a weight in NF4 do not divide over the ranks.
    """
    _check_rows_in_nf4(model, num_shards=mesh.size(mesh.ndim - 1))
    blocks = get_blocks(model, option)
    if not is_trained:
        policy = replace(policy, reshard_after_forward=True)
    alone = set(_large_children(model, num_elements=min(map(_count, _list_first_blocks(model)))))
    units: list[FSDPModule] = []  # in the order of the forward pass
    for child, is_tower in list_units(model):
        if is_tower:
            # the backward pass starts with the last block: if freed, it would be gathered again at once
            units += [
                _shard_unit(block, mesh, policy, reshard=not is_trained or block is not blocks[-1], experts=experts)
                for block in child.children()
            ]
        elif child in alone and isinstance(child, nn.Embedding):
            units.append(_shard_unit(child, mesh, policy, reshard=True))
            units[-1].set_unshard_in_backward(False)  # its gradient needs only the tokens
        elif child in alone and isinstance(child, _LOW_PRECISION):
            units.append(_shard_unit(child, mesh, policy, reshard=not is_trained))
    for unit, ahead in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([ahead])
    # last: FSDP2 assigns to a module what no submodule has claimed, here norm, positions and tied embeddings
    _fully_shard(
        model,
        mesh=mesh,
        mp_policy=policy.mixed_precision(low=False),
        offload_policy=policy.offload,
        reshard_after_forward=not is_trained,
    )


def shard_children(
    module: nn.Module, blocks: Sequence[nn.Module], *, mesh: DeviceMesh, policy: ShardPolicy, device: torch.device
) -> list[FSDPModule]:
    """Shard each part of a module that a step calls: its blocks one by one, and what is left of it as one unit.

    These parts are the children with weights, or what is in them where they are lists or dicts of modules.

    Args:
        module: With its weights, equal on every rank, in host memory.
        blocks: Parts of it, each called once in a forward pass; a block in another one is part of that.
        mesh: As for `shard_model`.
        policy: As for `shard_model`.
        device: Device of this rank; weights that are offloaded stay in host memory.

    Returns:
        The parts.
    """
    inner = {part for block in blocks for part in block.modules() if part is not block}
    for block in blocks:
        if block not in inner:
            _shard_unit(block, mesh, policy, reshard=True)
    roots: list[FSDPModule] = []
    for child in dict.fromkeys(_list_called(module)):
        if not isinstance(child, FSDPModule):
            _fully_shard(
                child,
                mesh=mesh,
                mp_policy=policy.mixed_precision(low=False),
                offload_policy=policy.offload,
                reshard_after_forward=False,
            )
        assert isinstance(child, FSDPModule), "`fully_shard` adds the class to the one of the module"
        roots.append(child)
    for name, buffer in [*module.named_buffers()]:
        owner = module.get_submodule(name.rpartition(".")[0])
        owner._buffers[name.rpartition(".")[2]] = buffer.to(device)
    return roots


def _list_called(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if _holds_only(child):
            yield from _list_called(child)
        elif any(True for _ in child.parameters()):
            yield child


def list_uncalled(module: nn.Module) -> list[str]:
    """Return the names of the parameters that belong to no part of `shard_children`, so that nothing gathers them."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    for prefix, child in module.named_children():
        names += [f"{prefix}.{name}" for name in list_uncalled(child)] if _holds_only(child) else []
    return names


def _holds_only(module: nn.Module) -> bool:
    """Return whether a module has no forward pass, as a list or dict of modules or parameters."""
    return type(module).forward is nn.Module.forward


def _fully_shard(module: nn.Module, **how: Any) -> None:
    """Make a module a unit of FSDP2, which puts a class derived from its own in the place of that.

    Raises:
        ConfigError: Python does not allow that for this class.
    """
    try:
        fully_shard(module, **how)
    except TypeError as error:
        if "object layout differs" not in str(error):
            raise
        name = type(module).__name__
        raise ConfigError(
            f"strategy=fsdp of {type(module).__module__}.{name}",
            "FSDP2 gives a module another class, which Python refuses for one with ABC before nn.Module in its bases",
            f"class {name}(nn.Module, ABC), or that order in its base, or strategy=ddp",
        ) from error


@contextmanager
def keep_gathered(root: FSDPModule) -> Iterator[None]:
    """Gather all weights now and free them at the end, whatever forward passes run in between. A collective."""
    groups = _list_groups(root)
    freed_after_forward = [group.post_forward_mesh_info for group in groups]
    units = [module for module in _as_module(root).modules() if isinstance(module, FSDPModule)]
    root._get_fsdp_state()._lazy_init()  # as a forward pass would, which must find the same streams
    try:
        for group in groups:
            group.post_forward_mesh_info = None
        for unit in units:
            unit.unshard()
        yield
    finally:
        for group, mesh_info in zip(groups, freed_after_forward, strict=True):
            group.post_forward_mesh_info = mesh_info
        for unit in units:
            unit.reshard()


def count_gathered_bytes(root: FSDPModule) -> int:
    """Return the size of the gathered weights."""
    sizes = (
        (parameter._orig_size.numel(), (group.mp_policy.param_dtype or parameter.orig_dtype).itemsize)
        for group in _list_groups(root)
        for parameter in group.fsdp_params
    )
    return sum(num_elements * itemsize for num_elements, itemsize in sizes)


def _list_groups(root: FSDPModule) -> list[FSDPParamGroup]:
    units = (module for module in _as_module(root).modules() if isinstance(module, FSDPModule))
    return [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]


def _as_module(root: FSDPModule) -> nn.Module:
    assert isinstance(root, nn.Module), "`fully_shard` adds the class to the one of the module"
    return root


def _check_rows_in_nf4(model: nn.Module, *, num_shards: int) -> None:
    """Reject row counts that FSDP2 would have to pad: torchao's NF4Tensor (0.18) can only be split evenly."""
    for name, weight in list_nf4(model):
        if len(weight) % num_shards:
            raise ConfigError(
                f"adapter.quantization=nf4 with {num_shards} shards",
                f"{name} has {len(weight)} rows, which are not divisible by {num_shards}",
                "strategy=ddp, adapter=lora, or another number of devices",
            )


def _shard_unit(
    module: nn.Module,
    mesh: DeviceMesh,
    policy: ShardPolicy,
    *,
    reshard: bool,
    experts: ExpertSharding | None = None,
) -> FSDPModule:
    """Shard one module: matrices in a low-precision group, all other parameters in a full-precision group.

    Both groups are gathered before the module and freed after it. FSDP2 has one policy per module, and a module per
    policy would put its hooks inside the block: torch.compile would break the graph there, and the next block would be
    gathered only when the last norm of this one is reached. So the second group joins the state of the first, which is
    how FSDP2 keeps the parameters of a module on two meshes (torch 2.13; private names, this is their only use).
    Expert weights under expert parallelism form a third group.
    """
    divided = [] if experts is None else _list_weights_of_experts(module)
    low, full = _split_by_precision(module) if policy.precision.is_mixed else (list(module.parameters()), [])
    low, full = ([p for p in group if not any(p is other for other in divided)] for group in (low, full))
    first, second = (low, full) if low else (full, [])
    _fully_shard(
        module,
        mesh=mesh,
        mp_policy=policy.mixed_precision(low=bool(low)),
        offload_policy=policy.offload,
        reshard_after_forward=reshard and policy.reshard_after_forward,
        shard_placement_fn=functools.partial(_choose_placement, num_shards=mesh.size(mesh.ndim - 1)),
        ignored_params={*second, *divided},
    )
    assert isinstance(module, FSDPModule)
    state = module._get_fsdp_state()
    [group] = state._fsdp_param_groups
    assert len(group.fsdp_params) == len(set(first))
    if second:
        other = FSDPParamGroup(
            second,
            group.modules,
            group.mesh_info,
            group.post_forward_mesh_info,
            group.device,
            None,
            policy.mixed_precision(low=False),
            policy.offload,
        )
        state._fsdp_param_groups.append(other)
    if experts is not None and divided:
        state._fsdp_param_groups.append(_make_group_of_experts(divided, group, experts, policy))
    return module


def _make_group_of_experts(
    weights: list[nn.Parameter], beside: FSDPParamGroup, experts: ExpertSharding, policy: ShardPolicy
) -> FSDPParamGroup:
    """Return a parameter group on the expert mesh that is gathered and freed with another group."""
    info = get_mesh_info(experts.mesh)
    assert isinstance(info, FSDPMeshInfo)
    group = FSDPParamGroup(
        weights,
        beside.modules,
        info,
        None if beside.post_forward_mesh_info is None else info,
        beside.device,
        lambda _: Shard(1),  # rows: a rank may have fewer experts than there are shards
        policy.mixed_precision(low=policy.precision.is_mixed),
        policy.offload,
    )
    group.gradient_divide_factor = experts.num_averaged
    # gloo cannot scale while it reduces; a single shard would be scaled twice (torch 2.13)
    group.force_sum_reduction_for_comms = info.shard_mesh_size > 1
    return group


def _list_weights_of_experts(module: nn.Module) -> list[nn.Parameter]:
    return [part.weight for part in module.modules() if isinstance(part, GroupedLinear)]


def _choose_placement(parameter: nn.Parameter, *, num_shards: int) -> Shard | None:
    """Return the shard placement of a parameter; None shards its first axis.

    Expert weights, [E, M, K], are sharded by rows if the experts do not divide evenly over the ranks: some ranks would
    hold nothing, and all of them would gather as much padding.
    """
    divides_rows = parameter.ndim == 3 and parameter.shape[0] % num_shards and not parameter.shape[1] % num_shards
    return Shard(1) if divides_rows else None


def _split_by_precision(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that autocast casts, and all others: norms, embeddings, direct parameters."""
    matrices = (part for part in module.modules() if isinstance(part, _LOW_PRECISION))
    low = {parameter for part in matrices for parameter in part.parameters(recurse=False)}
    everything = list(dict.fromkeys(module.parameters()))
    return [p for p in everything if p in low], [p for p in everything if p not in low]


def _list_first_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the first block of each tower, with which all of it are alike."""
    return [next(tower.children()) for tower in named_blocks(model).values()]


def _large_children(model: nn.Module, *, num_elements: int) -> Iterable[nn.Module]:
    """Return the children with at least as many elements as a small block whose weights no other module shares."""
    uses: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[parameter] = uses.get(parameter, 0) + 1
    units = (child for child, _ in list_units(model))
    unshared = (child for child in units if all(uses[parameter] == 1 for parameter in child.parameters()))
    return [child for child in unshared if _count(child) >= num_elements]


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
