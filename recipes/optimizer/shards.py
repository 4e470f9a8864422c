"""Layout of sharded and replicated parameters over ranks, for optimizers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.parallel import placement

_MAX_ELEMENTS = 2**26  # elements of parameters updated together: temporaries of 256 MiB in float32


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a DTensor, detached and sharing its memory; other tensors are only detached."""
    return placement.local(tensor.detach())


def in_chunks(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters in chunks that bound the temporary memory of an update, the same on every rank."""
    chunk: list[nn.Parameter] = []
    num_elements = 0
    for parameter in parameters:
        if chunk and num_elements + parameter.numel() > _MAX_ELEMENTS:
            yield chunk
            chunk, num_elements = [], 0
        chunk.append(parameter)
        num_elements += parameter.numel()
    if chunk:
        yield chunk


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is sharded and replicated over ranks.

    Attributes:
        shards: Process group that shards one replica by rows; None: not sharded.
        replicas: Process group of ranks with the same rows; None: there is one replica, or replicas are updated
            independently.
    """

    shards: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None

    @property
    def num_shards(self) -> int:
        """Number of ranks that shard one replica."""
        return 1 if self.shards is None else self.shards.size()

    @property
    def shard(self) -> int:
        """Index of this rank's shard."""
        return 0 if self.shards is None else self.shards.rank()

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return 1 if self.replicas is None else self.replicas.size()

    @property
    def replica(self) -> int:
        """Index of this rank's replica."""
        return 0 if self.replicas is None else self.replicas.rank()

    def num_rows(self, shard: int, *, of: int) -> int:
        """Return the number of rows of a parameter in a shard, split as by torch.chunk; may be 0."""
        size = -(-of // self.num_shards)
        return max(min(size, of - shard * size), 0)

    def rows(self, *, of: int) -> slice:
        """Return the slice of a parameter's rows that this rank holds."""
        first = min(-(-of // self.num_shards) * self.shard, of)
        return slice(first, first + self.num_rows(self.shard, of=of))


def get_layout(parameter: Tensor, *, replicas: dist.ProcessGroup | None = None) -> Layout:
    """Return the layout of a parameter, which all parameters of its model share.

    Args:
        parameter: A DTensor on a mesh whose last dimension shards rows and whose preceding dimension replicates, as in
            FSDP2; or a plain tensor.
        replicas: Process group of ranks that hold the same plain tensor.
    """
    if not isinstance(parameter, DTensor):
        return Layout(replicas=replicas)
    mesh, placements = parameter.device_mesh, parameter.placements
    assert placements[-1].is_shard(0), placements
    assert mesh.ndim <= 2, mesh
    assert mesh.ndim == 1 or placements[0].is_replicate(), placements
    return Layout(shards=mesh.get_group(mesh.ndim - 1), replicas=mesh.get_group(0) if mesh.ndim == 2 else None)
