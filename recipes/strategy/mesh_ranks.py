"""Mesh and process groups of a strategy: which samples each rank has, and sums over subsets of ranks."""

from typing import Any

import torch
from torch import Tensor

from recipes.mesh import Mesh
from recipes.numerics.collectives import sum_over_ranks
from recipes.parallel.groups import Groups, make_groups
from recipes.parallel.schedule import PipelineSchedule


class MeshRanksMixin:
    """Implements the rank-related members of `recipes.strategy.Engine`.

    Attributes:
        mesh: Sizes of the device mesh; set once the process group exists.
        groups: The process groups that this rank is in.
        data_size: Number of ranks, or groups of ranks, with different samples.
        averaged_size: Number of ranks over which gradients are averaged.
        pipeline: Computes the gradients of a step under pipeline parallelism; None without it.
        num_micro_batches: Micro-batches per step, for a pipeline.
    """

    mesh = Mesh()
    groups = Groups()
    # plain integers, not properties of the mesh: every micro-batch reads them
    data_size = 1
    averaged_size = 1
    pipeline: PipelineSchedule | None = None
    num_micro_batches = 1
    _configured_mesh: Mesh | None = None

    def connect_ranks(self) -> None:
        """Create the mesh and its groups. A collective, called once the process group exists.

        Without a configured mesh every rank is data-parallel.
        """
        world_size = self._strategy.world_size
        self.mesh = self._configured_mesh or Mesh(shard=world_size)
        assert self.mesh.world_size == world_size, f"{self.mesh} != {world_size} ranks"
        self.groups = make_groups(self.mesh)
        self.data_size, self.averaged_size = self.mesh.data_size, self.mesh.averaged_size

    @property
    def data_rank(self) -> int:
        """Data-parallel rank, below `data_size`."""
        return self.mesh.data_rank(self._strategy.global_rank)

    @property
    def writes_unsharded(self) -> bool:
        """Whether this rank writes the unsharded tensors that all ranks with the same layers hold."""
        place = self.mesh.place(self._strategy.global_rank)
        return not any(place._replace(pipeline=0))

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks."""
        return sum_over_ranks(value, self._communication_device)

    def sum_over_data_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a per-sample quantity, such as the number of targets, over the data-parallel ranks."""
        return sum_over_ranks(value, self._communication_device, self.groups.data)

    def sum_over_token_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a per-token quantity, such as a loss, over the ranks with different tokens."""
        return sum_over_ranks(value, self._communication_device, self.groups.tokens)

    @property
    def _communication_device(self) -> torch.device:
        # CPU tensors are on `cpu` without an index, whatever the rank
        device: torch.device = self._strategy.root_device
        return device if device.type == "cuda" else torch.device("cpu")

    @property
    def _strategy(self) -> Any:
        return self  # typed as the strategy it is mixed into
