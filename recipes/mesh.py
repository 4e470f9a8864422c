"""Which rank holds what: the sizes of the device mesh, and the place of each rank in it. Pure arithmetic, no torch.

From the outermost to the innermost dimension: pipeline, replicate, shard, context, tensor. Ranks next to each other
differ in the innermost one, whose traffic is the heaviest: it stays within a node.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

# stages of layers on each rank; of the schedule that is not here, one
STAGES_PER_RANK = {"Interleaved1F1B": 2, "ZBVZeroBubble": 2}


def least_micro_batches(schedule: str, num_ranks: int) -> int:
    """Return the micro-batches of a step below which torch refuses a schedule (2.13).

    Args:
        schedule: torch's name of it.
        num_ranks: That divide the layers.
    """
    return 1 if schedule == "ZBVZeroBubble" else num_ranks


class Place(NamedTuple):
    """Where a rank is in the mesh, from 0 along each dimension."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks along each dimension.

    Attributes:
        pipeline: Ranks that divide the layers.
        replicate: Copies of the model.
        shard: Ranks that divide the weights of a copy, each with samples of its own.
        context: Ranks that divide every sequence.
        tensor: Ranks that divide every matrix.
        expert: Ranks that divide the experts, among those of `shard` and `context`, the innermost of which they are.
        sequence_parallel: Whether those of `tensor` divide the sequence between matrices, too.
        pipeline_schedule: In which order stages of layers compute micro-batches, by torch's name.
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
        """All ranks."""
        return self.data_size * self.model_size

    @property
    def data_size(self) -> int:
        """Ranks, or groups of ranks, that have different samples."""
        return self.replicate * self.shard

    @property
    def model_size(self) -> int:
        """Ranks that work on the same samples."""
        return self.pipeline * self.context * self.tensor

    @property
    def averaged_size(self) -> int:
        """Ranks whose gradients an engine averages: those that have different tokens."""
        return self.data_size * self.context

    @property
    def expert_shard(self) -> int:
        """Ranks that divide the weights of the same experts."""
        return self.shard * self.context // self.expert

    def place(self, rank: int) -> Place:
        """Return where a rank is."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        rest, shard = divmod(rest, self.shard)
        pipeline, replicate = divmod(rest, self.replicate)
        return Place(pipeline, replicate, shard, context, tensor)

    def data_rank(self, rank: int) -> int:
        """Return which samples a rank has, of `data_size`."""
        place = self.place(rank)
        return place.replicate * self.shard + place.shard

    def groups(self, *dimensions: str) -> Iterator[list[int]]:
        """Yield the groups of ranks that differ in these dimensions alone, each in order; every rank is in one."""
        groups: dict[Place, list[int]] = {}
        for rank in range(self.world_size):
            key = self.place(rank)._replace(**dict.fromkeys(dimensions, 0))
            groups.setdefault(key, []).append(rank)
        yield from groups.values()

    def sizes(self) -> dict[str, int]:
        """Return the ranks along each dimension that has several."""
        sizes = {name: getattr(self, name) for name in (*Place._fields, "expert")}
        return {name: size for name, size in sizes.items() if size > 1}
