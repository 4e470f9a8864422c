"""Mesh and process groups of a strategy: which samples each rank has, and sums over subsets of ranks."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.mesh import Mesh
from recipes.numerics.collectives import gather_rows, sum_over_ranks
from recipes.parallel.groups import Groups, make_groups
from recipes.parallel.schedule import PipelineSchedule

log = logging.getLogger("lightning_recipes")
_USABLE_SHARE = 0.8  # of the free memory; the rest is for keys, values and logits


class MeshRanksMixin:
    """Implements the rank-related members of `recipes.engine.Engine`.

    Attributes:
        mesh: Sizes of the device mesh; set once the process group exists.
        groups: The process groups that this rank is in.
        data_size: Number of ranks, or groups of ranks, with different samples.
        averaged_size: Number of ranks over which gradients are averaged.
        pipeline: Computes the gradients of a step under pipeline parallelism; None without it.
        num_micro_batches: Micro-batches per step, for a pipeline.
        shards_weights: Whether each rank keeps a shard of the weights, block by block.
    """

    mesh = Mesh()
    groups = Groups()
    # plain integers, not properties of the mesh: every micro-batch reads them
    data_size = 1
    averaged_size = 1
    pipeline: PipelineSchedule | None = None
    num_micro_batches = 1
    shards_weights: ClassVar[bool] = False
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
    def gathers_by_hooks(self) -> bool:
        """Whether hooks that torch.compile cannot trace gather the weights."""
        return False

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

    def gather_over_data_ranks(self, value: Tensor) -> Tensor:
        """Return the rows of all data-parallel ranks, [B, ...] -> [N B, ...]; a differentiable collective."""
        return gather_rows(value, self.groups.data)

    @contextmanager
    def gather_for_generation(self) -> Iterator[bool]:
        """Prepare the weights for text generation; yield whether a forward pass then needs no other rank.

        Layers on other ranks, or parts of them, need those ranks. A collective.
        """
        with self._hold_whole_weights() as holds_whole:
            yield holds_whole and self.mesh.tensor == self.mesh.pipeline == self.mesh.expert == 1

    def _gathers_once(self, setting: Literal["auto", "per_call", "per_token"], *, num_bytes: int) -> bool:
        """Return whether to gather the weights once for a text rather than for each of its tokens. A collective.

        Args:
            setting: `auto` decides by the free memory of the devices; a CPU's is not known, and taken to be enough.
            num_bytes: Size of the gathered weights.
        """
        device = self._communication_device
        if setting != "auto" or device.type != "cuda":
            return setting != "per_token"
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        lacks_room = torch.tensor(float(num_bytes > _USABLE_SHARE * free), device=device)
        is_short = bool(self.sum_over_ranks(lacks_room) > 0)
        if is_short:
            needed = f"{num_bytes / 2**30:.1f} GiB"
            log.info(f"Weights are gathered for each token of a text: whole, {needed}, they do not fit on each device")
        return not is_short

    @contextmanager
    def _hold_whole_weights(self) -> Iterator[bool]:
        """Hold the weights that an engine shards whole, where memory allows; yield whether they are."""
        yield True

    def share_first(self, value: Tensor) -> Tensor:
        """Return the first rank's value of a tensor on every rank."""
        if self._strategy.world_size > 1:
            on_ranks = value.to(self._communication_device)
            dist.broadcast(on_ranks, src=0)
            value = on_ranks.to(value.device)
        return value

    @property
    def _communication_device(self) -> torch.device:
        # CPU tensors are on `cpu` without an index, whatever the rank
        device: torch.device = self._strategy.root_device
        return device if device.type == "cuda" else torch.device("cpu")

    @property
    def _strategy(self) -> Any:
        return self  # typed as the strategy it is mixed into
