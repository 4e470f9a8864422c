"""What every strategy knows of its ranks: which samples they have, and which of them add up what."""

from typing import Any

import torch
from torch import Tensor

from recipes.mesh import Mesh
from recipes.numerics.collectives import sum_over_ranks
from recipes.parallel.groups import Groups, make_groups
from recipes.parallel.schedule import PipelineSchedule


class MeshRanksMixin:
    """Implements the part of `recipes.strategy.Engine` about ranks.

    Attributes:
        mesh: Sizes of the device mesh; set once the ranks have found each other.
        groups: The process groups that this rank is in.
        data_size: Ranks, or groups of ranks, that have different samples.
        averaged_size: Ranks over which gradients are averaged.
        pipeline: Computes the gradients of a step where ranks divide the layers; None: they do not.
        num_micro_batches: Of a step, for a pipeline.
    """

    mesh = Mesh()
    groups = Groups()
    # plain numbers, not properties of the mesh: every micro-batch reads them
    data_size = 1
    averaged_size = 1
    pipeline: PipelineSchedule | None = None
    num_micro_batches = 1
    _configured_mesh: Mesh | None = None

    def connect_ranks(self) -> None:
        """Lay out the mesh. A collective, called once the process group exists.

        Without a configured mesh every rank has samples of its own.
        """
        world_size = self._strategy.world_size
        self.mesh = self._configured_mesh or Mesh(shard=world_size)
        assert self.mesh.world_size == world_size, f"{self.mesh} != {world_size} ranks"
        self.groups = make_groups(self.mesh)
        self.data_size, self.averaged_size = self.mesh.data_size, self.mesh.averaged_size

    @property
    def data_rank(self) -> int:
        """Which samples this rank has, of `data_size`."""
        return self.mesh.data_rank(self._strategy.global_rank)

    @property
    def writes_unsharded(self) -> bool:
        """Whether this rank writes what every rank that has the same layers holds unsharded."""
        place = self.mesh.place(self._strategy.global_rank)
        return not any(place._replace(pipeline=0))

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks."""
        return sum_over_ranks(value, self._communication_device)

    def sum_over_data_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of what belongs to samples, such as a number of targets, over ranks with other samples."""
        return sum_over_ranks(value, self._communication_device, self.groups.data)

    def sum_over_token_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of what belongs to tokens, such as a loss, over ranks with other tokens."""
        return sum_over_ranks(value, self._communication_device, self.groups.tokens)

    @property
    def _communication_device(self) -> torch.device:
        # the tensors of a CPU with an index lie on `cpu`, whatever the rank
        device: torch.device = self._strategy.root_device
        return device if device.type == "cuda" else torch.device("cpu")

    @property
    def _strategy(self) -> Any:
        return self  # as what it is mixed into
