"""Simulate rank 0 of any number of ranks in one process, with no-op collectives."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from recipes.mesh import Mesh
from recipes.numerics import linear
from recipes.parallel.experts import ExpertRanks, make_expert_mesh
from recipes.precision import Precision
from recipes.torch_internals import FakeStore, unset_fake_temporarily


@dataclass(frozen=True, kw_only=True)
class MeshGroups:
    """Process groups of the recorded rank.

    Attributes:
        device_mesh: Mesh of FSDP2, as created by `FSDP2Strategy`; None under other strategies.
        expert_mesh: Mesh of expert weights; None without expert parallelism.
        context: Context-parallel ranks; None without context parallelism.
    """

    device_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    context: dist.ProcessGroup | None = None

    def dimensions(self) -> dict[str, str]:
        """Return the mesh dimension of each group name.

        If the same ranks shard weights and split experts, torch (2.13) has one group, which counts as shards.
        """
        names: dict[str, str] = {} if self.context is None else {self.context.group_name: "context"}
        for mesh in filter(None, (self.device_mesh, self.expert_mesh)):
            for name in mesh.mesh_dim_names or ():
                names.setdefault(mesh[name].get_group().group_name, name)
        return names


def make_groups(mesh: Mesh, *, shards: bool) -> MeshGroups:
    """Create the process groups of a rank.

    Args:
        mesh: Mesh of all ranks.
        shards: Whether FSDP2 is used.
    """
    context = dist.new_group(next(mesh.groups("context"))) if mesh.context > 1 else None
    if not shards:
        return MeshGroups(context=context)
    shape = {"replicate": mesh.replicate} if mesh.replicate > 1 else {}
    shape |= {"shard": mesh.shard * mesh.context} | ({"tensor": mesh.tensor} if mesh.tensor > 1 else {})
    device_mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    return MeshGroups(device_mesh=device_mesh, expert_mesh=make_expert_mesh(mesh, "cpu"), context=context)


@contextlib.contextmanager
def even_loads() -> Iterator[None]:
    """Make expert-parallel ranks receive as many rows as they send: fake tensors have no values to count."""

    def read_sizes(self: ExpertRanks, sizes: Tensor, *, num_rows: int) -> tuple[list[int], list[int]]:
        share, rest = divmod(num_rows, self.size)
        even = [share + (rank < rest) for rank in range(self.size)]
        return even, even

    with patch.object(ExpertRanks, "read_sizes", read_sizes):
        yield


@contextlib.contextmanager
def real_meshes() -> Iterator[None]:
    """Let FSDP2 combine its mesh with a tensor-parallel one, which reads values that fake tensors lack."""
    before = DeviceMesh._concatenate

    def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return before(meshes)

    with patch.object(DeviceMesh, "_concatenate", staticmethod(concatenate)):
        yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def autocast(precision: Precision, device_type: str = "cpu") -> contextlib.AbstractContextManager[Any]:
    """Return autocast as Lightning's plugin enters it; fake tensors are on the CPU."""
    if not precision.is_mixed:
        return contextlib.nullcontext()
    return torch.autocast(device_type, precision.compute_dtype, cache_enabled=False)


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Simulate rank 0 of a process group with no-op collectives; 0 means that none is needed."""
    if world_size == 0:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def gpu_operators(on_gpu: bool) -> Iterator[None]:
    """Emulate what differs on a GPU: dropout keeps a mask of one byte per element, and no product is oneDNN's."""
    if not on_gpu:
        yield
        return

    def native(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        return torch.native_dropout(input, p, True)[0]

    with patch.object(nn.functional, "dropout", native), patch.object(linear, "ONEDNN_IS_FASTER", False):
        yield


@contextlib.contextmanager
def no_truncated_draws() -> Iterator[None]:
    """Let `nn.init.trunc_normal_` leave tensors as they are, as the other initializers do with those of a plan.

    From torch 2.12 on (pytorch/pytorch#174997) it draws until all values are within bounds, and reads whether they are.
    """
    with patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor):
        yield


# torch 2.13 has no kernel of it for tensors without storage, so that FakeTensorMode would run it on real ones of the
# same sizes: 7 GB to plan SGD for a model of 1.2 billion parameters. It changes its arguments and returns nothing
_WITHOUT_STORAGE = torch.library.Library("aten", "IMPL", "Meta")
_WITHOUT_STORAGE.impl("_fused_sgd_", lambda *_, **__: None)
