"""Create the process groups of a mesh."""

from dataclasses import dataclass

import torch.distributed as dist

from recipes.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Process groups that this rank belongs to.

    Attributes:
        pipeline: Pipeline-parallel ranks; None if there is only this one.
        tensor: Tensor-parallel ranks; None if there is only this one.
        context: Context-parallel ranks; None if there is only this one.
        data: Ranks with different samples; None means all ranks.
        tokens: Ranks with different tokens, including other pipeline stages; None means all ranks.
        stage: Ranks with the same layers; None means all ranks.
    """

    pipeline: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    tokens: dist.ProcessGroup | None = None
    stage: dist.ProcessGroup | None = None


def make_groups(mesh: Mesh) -> Groups:
    """Create the process groups of a mesh. A collective: every rank creates every group, in the same order."""
    if mesh.model_size == 1:
        return Groups()
    return Groups(
        pipeline=_make_group(mesh, "pipeline") if mesh.pipeline > 1 else None,
        tensor=_make_group(mesh, "tensor") if mesh.tensor > 1 else None,
        context=_make_group(mesh, "context") if mesh.context > 1 else None,
        data=_make_group(mesh, "replicate", "shard"),
        tokens=_make_group(mesh, "pipeline", "replicate", "shard", "context"),
        stage=_make_group(mesh, "replicate", "shard", "context", "tensor") if mesh.pipeline > 1 else None,
    )


def _make_group(mesh: Mesh, *dimensions: str) -> dist.ProcessGroup:
    own: dist.ProcessGroup
    own, _ = dist.new_subgroups_by_enumeration(list(mesh.groups(*dimensions)))
    return own
