"""Share one snapshot among the ranks of a node that hold identical weights and optimizer state, as under DDP.

Each rank copies a subset of the tensors to the host, and broadcasts it to the others at a rollback.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from ..lightning_internals import averages_weights_periodically
from ..lightning_packages import find_classes
from ..ranks import all_ranks, gather_values, num_ranks
from .train_state import live_tensors

log = logging.getLogger("lightning_recipes")
_LEAST_ELEMENTS = 1024  # smaller tensors are not worth sending: every rank keeps them
_SHARED_KINDS = ("module/", "optimizer/")  # not buffers: batch norm statistics differ per rank


class NodeReplicas:
    """The ranks of this node.

    Args:
        first_rank: Global rank of the node's first rank.
        group: Process group of the node's ranks.
    """

    def __init__(self, first_rank: int, group: Any) -> None:
        self._first_rank = first_rank
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def assign(self, tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> dict[str, int]:
        """Assign each shared tensor to a rank of the node, balanced by bytes; the result is the same on every rank.

        Args:
            tensors: Pairs of name and tensor, in the same order on every rank.
            device: Device whose tensors the ranks can send.

        Returns:
            Local rank by tensor name.
        """
        owners: dict[str, int] = {}
        num_bytes = [0] * self.size
        for name, tensor in tensors:
            if is_shared(name, tensor, device):
                owners[name] = num_bytes.index(min(num_bytes))
                num_bytes[owners[name]] += tensor.nbytes
        return owners

    @torch.no_grad()
    def send(self, tensors: Iterable[tuple[str, Tensor]], owners: dict[str, int]) -> None:
        """Broadcast every shared tensor from the rank that keeps it to the other ranks, in place."""
        for name, tensor in tensors:
            if name not in owners:
                continue
            values = tensor.detach().contiguous()
            dist.broadcast(values, src=self._first_rank + owners[name], group=self._group)
            if values.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(values)


def is_shared(name: str, tensor: Tensor, device: torch.device) -> bool:
    """Return whether one copy of a tensor per node suffices if its ranks hold the same train state."""
    return name.startswith(_SHARED_KINDS) and tensor.device.type == device.type and tensor.numel() >= _LEAST_ELEMENTS


def find_replicas(trainer: Trainer) -> NodeReplicas | None:
    """Return this node's ranks if all hold the same train state; None if each rank must keep its own snapshots.

    Every rank must call it. The states are compared once, by the number of tensors and the sum of each, because an
    optimizer may shard its state over the ranks.
    """
    strategy = trainer.strategy
    is_ddp = isinstance(strategy, find_classes("strategies.DDPStrategy"))
    if not is_ddp or isinstance(strategy, find_classes("strategies.DeepSpeedStrategy")) or num_ranks() == 1:
        return None
    if averages_weights_periodically(strategy):
        return None
    per_node = trainer.world_size // max(1, trainer.num_nodes)
    node = trainer.global_rank // max(1, per_node)
    in_order = per_node > 1 and trainer.global_rank == node * per_node + trainer.local_rank
    if not all_ranks(in_order, strategy.root_device):
        return None
    groups: list[Any] = [dist.group.WORLD]
    if trainer.num_nodes > 1:
        groups = [
            dist.new_group(list(range(first, first + per_node))) for first in range(0, trainer.world_size, per_node)
        ]
    replicas = NodeReplicas(node * per_node, groups[node if trainer.num_nodes > 1 else 0])
    if not all_ranks(_hold_the_same(trainer, replicas), strategy.root_device):
        if trainer.is_global_zero:
            log.info("The ranks hold different weights or optimizer state: each keeps its own snapshots")
        return None
    return replicas


def _hold_the_same(trainer: Trainer, replicas: NodeReplicas) -> bool:
    device = trainer.strategy.root_device
    shared = [(name, tensor) for name, tensor in live_tensors(trainer, writes_back=False)]
    sums = [tensor.sum(dtype=torch.float64) for name, tensor in shared if is_shared(name, tensor, device)]
    by_rank = gather_values([float(len(sums))], device)
    if not sums or any(values != by_rank[0] for values in by_rank):
        return False
    own = torch.stack(sums).to(device)  # [tensors], float64
    of_all = own.new_empty(replicas.size * len(own))
    dist.all_gather_into_tensor(of_all, own, group=replicas._group)
    # compare bits, so that NaN equals NaN
    return bool((of_all.view(replicas.size, -1).view(torch.int64) == own.view(torch.int64)).all())
