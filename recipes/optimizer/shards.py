"""What a rank holds of a parameter, all of it or some of its rows, and which ranks hold the rest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_MAX_ELEMENTS = 2**26  # of the parameters that are updated together: temporaries of 256 MiB in float32


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a DTensor, which share its memory; any other tensor as it is."""
    tensor = tensor.detach()
    rows: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return rows


def in_chunks(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters in lists that bound the temporary memory of an update, the same lists on every rank."""
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
    """How the ranks hold a model.

    Attributes:
        shards: Ranks that hold one copy together, each some rows of every parameter; None: a rank holds all rows.
        replicas: Ranks that hold the same rows, one of each copy; None: there is one copy, or the copies are updated
            independently of each other.
    """

    shards: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None

    @property
    def num_shards(self) -> int:
        """Ranks of one copy."""
        return 1 if self.shards is None else self.shards.size()

    @property
    def shard(self) -> int:
        """Number of this rank among those of its copy."""
        return 0 if self.shards is None else self.shards.rank()

    @property
    def num_replicas(self) -> int:
        """Copies."""
        return 1 if self.replicas is None else self.replicas.size()

    @property
    def replica(self) -> int:
        """Number of this rank's copy."""
        return 0 if self.replicas is None else self.replicas.rank()

    def num_rows(self, shard: int, *, of: int) -> int:
        """Return how many of a parameter's rows a rank of a copy holds, as torch.chunk splits them; possibly none."""
        size = -(-of // self.num_shards)
        return max(min(size, of - shard * size), 0)

    def rows(self, *, of: int) -> slice:
        """Return which of a parameter's rows this rank holds."""
        first = min(-(-of // self.num_shards) * self.shard, of)
        return slice(first, first + self.num_rows(self.shard, of=of))


def get_layout(parameter: Tensor, *, replicas: dist.ProcessGroup | None = None) -> Layout:
    """Return how the ranks hold a parameter, and so all others of its model.

    Args:
        parameter: A DTensor of a mesh whose last axis shards rows and whose axis before it replicates, as FSDP2 makes
            it; or a plain tensor.
        replicas: Of a plain tensor: the ranks that hold it too.
    """
    if not isinstance(parameter, DTensor):
        return Layout(replicas=replicas)
    mesh, placements = parameter.device_mesh, parameter.placements
    assert placements[-1].is_shard(0), placements
    assert mesh.ndim <= 2, mesh
    assert mesh.ndim == 1 or placements[0].is_replicate(), placements
    return Layout(shards=mesh.get_group(mesh.ndim - 1), replicas=mesh.get_group(0) if mesh.ndim == 2 else None)
