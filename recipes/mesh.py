"""Device mesh: the size of each dimension and the coordinates of each rank. Pure arithmetic, no torch.

Dimensions from outermost to innermost: pipeline, replicate, shard, context, tensor. Neighboring ranks differ in the
innermost dimension, which has the most communication and so stays within a node.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

# pipeline stages per rank; one for schedules not listed
STAGES_PER_RANK = {"Interleaved1F1B": 2, "ZBVZeroBubble": 2}


def least_micro_batches(schedule: str, num_ranks: int) -> int:
    """Return the smallest number of micro-batches per step with which torch accepts a schedule (2.13).

    Args:
        schedule: Name of the schedule in torch.
        num_ranks: Pipeline-parallel ranks.
    """
    return 1 if schedule == "ZBVZeroBubble" else num_ranks


class Place(NamedTuple):
    """Coordinates of a rank in the mesh, counted from 0 along each dimension."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Number of ranks along each dimension.

    Attributes:
        pipeline: Pipeline-parallel ranks.
        replicate: Model replicas.
        shard: Ranks that shard the weights of a replica (FSDP), each with its own samples.
        context: Context-parallel ranks, which shard the sequence.
        tensor: Tensor-parallel ranks.
        expert: Expert-parallel ranks, the innermost among those of `shard` and `context`.
        sequence_parallel: Whether tensor-parallel ranks also shard the sequence between linear layers.
        pipeline_schedule: Name of the pipeline schedule in torch.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    sequence_parallel: bool = True
    pipeline_schedule: str = "1F1B"

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.data_size * self.model_size

    @property
    def data_size(self) -> int:
        """Number of ranks, or groups of ranks, with different samples."""
        return self.replicate * self.shard

    @property
    def model_size(self) -> int:
        """Number of ranks that work on the same samples."""
        return self.pipeline * self.context * self.tensor

    @property
    def averaged_size(self) -> int:
        """Number of ranks with different tokens, over which an engine averages gradients."""
        return self.data_size * self.context

    @property
    def expert_shard(self) -> int:
        """Number of ranks that shard the weights of the same experts."""
        return self.shard * self.context // self.expert

    def place(self, rank: int) -> Place:
        """Return the coordinates of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        rest, shard = divmod(rest, self.shard)
        pipeline, replicate = divmod(rest, self.replicate)
        return Place(pipeline, replicate, shard, context, tensor)

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel index of a rank, below `data_size`."""
        place = self.place(rank)
        return place.replicate * self.shard + place.shard

    def groups(self, *dimensions: str) -> Iterator[list[int]]:
        """Yield the groups of ranks that differ only in these dimensions, each in order; every rank is in one group."""
        groups: dict[Place, list[int]] = {}
        for rank in range(self.world_size):
            key = self.place(rank)._replace(**dict.fromkeys(dimensions, 0))
            groups.setdefault(key, []).append(rank)
        yield from groups.values()

    def sizes(self) -> dict[str, int]:
        """Return the number of ranks along each dimension that has more than one."""
        sizes = {name: getattr(self, name) for name in (*Place._fields, "expert")}
        return {name: size for name, size in sizes.items() if size > 1}
