"""Roll a run back to an in-process snapshot: one copy to take a snapshot, one to restore it."""

import copy
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import Tensor

from ..files import tolerating
from ..lightning_internals import allow_saves_after, averages_weights_periodically, get_callbacks
from ..lightning_packages import find_classes
from ..logged_step import output_folder
from ..memory.host_memory import available_bytes
from ..ranks import all_ranks, gather_values, num_ranks
from .snapshot import Snapshot, SnapshotRing
from .train_state import (
    forget_tensors,
    live_scalars,
    live_tensors,
    restore_scalars,
)

# Remove checkpoints of rolled-back steps from the list of Lightning's ModelCheckpoint.


def checkpoint_lists(trainer: Trainer) -> list[dict[str, Any]]:
    """Return a copy of every ModelCheckpoint's state: best scores, paths, latest checkpoint."""
    return [copy.deepcopy(saver.state_dict()) for saver in _find_savers(trainer)]


def restore_checkpoint_lists(trainer: Trainer, lists: list[dict[str, Any]]) -> None:
    """Restore the lists of a snapshot, without files that have been replaced since.

    Files of rolled-back steps stay on disk and are named in a log line: nothing is deleted, but `best_model_path` and
    `last_model_path` no longer refer to them.

    Args:
        trainer: The trainer, with `global_step` already restored.
        lists: Return value of `checkpoint_lists` at the time of the snapshot.
    """
    for saver, before in zip(_find_savers(trainer), lists, strict=True):
        allow_saves_after(saver, trainer.global_step)
        left = sorted(_paths(saver.state_dict()) - _paths(before))
        missing = trainer.strategy.broadcast(sorted(path for path in _paths(before) if not _exists(path)))
        saver.load_state_dict(_without(before, missing, lowest_is_best=saver.mode == "min"))
        saver.current_score = before["current_score"]
        if left and trainer.is_global_zero:
            log.warning(f"No longer in the list of ModelCheckpoint, as their steps were rolled back: {', '.join(left)}")


def _find_savers(trainer: Trainer) -> list[Any]:
    callbacks = get_callbacks(trainer)
    return [callback for callback in callbacks if isinstance(callback, find_classes("callbacks.ModelCheckpoint"))]


def _paths(state: dict[str, Any]) -> set[str]:
    return {path for path in (*state["best_k_models"], state["best_model_path"], state["last_model_path"]) if path}


def _exists(path: str) -> bool:
    exists: bool = get_filesystem(path).exists(path)
    return exists


def _without(state: dict[str, Any], missing: list[str], *, lowest_is_best: bool) -> dict[str, Any]:
    """Return the state without missing files; replace best and worst by those of the remaining files."""
    if not missing:
        return state
    models: dict[str, Tensor] = {path: score for path, score in state["best_k_models"].items() if path not in missing}
    ranked = sorted(models, key=lambda path: float(models[path]), reverse=not lowest_is_best)
    best, worst = (ranked[0], ranked[-1]) if ranked else ("", "")
    return state | {
        "best_k_models": models,
        "best_model_path": best if state["best_model_path"] in missing else state["best_model_path"],
        "best_model_score": models.get(best) if state["best_model_path"] in missing else state["best_model_score"],
        "kth_best_model_path": worst,
        "kth_value": models.get(worst, state["kth_value"]),
        "last_model_path": "" if state["last_model_path"] in missing else state["last_model_path"],
    }


# Share one snapshot among the ranks of a node that hold identical weights and optimizer state, as under DDP.
#
# Each rank copies a subset of the tensors to the host, and broadcasts it to the others at a rollback.

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


log = logging.getLogger("lightning_recipes")
GIB = 2**30
FOLDER = "snapshots"


class Rollback:
    """Takes and restores snapshots of a Trainer's train state.

    Args:
        num_snapshots: Snapshots held.
        quarantine_steps: Optimizer steps without a rollback after which a snapshot is good.
        snapshot_storage: `memory` (host), `disk` (run folder) or `auto`: memory if the snapshots fit.

    Attributes:
        seconds: Time for which the newest snapshot blocked training.
        num_bytes: Size of the newest snapshot on this rank.
    """

    def __init__(
        self,
        *,
        num_snapshots: int,
        quarantine_steps: int,
        snapshot_storage: Literal["auto", "memory", "disk"],
    ) -> None:
        self._num_snapshots = num_snapshots
        self._quarantine_steps = quarantine_steps
        self._snapshot_storage = snapshot_storage
        self._ring: SnapshotRing | None = None
        self._replicas: NodeReplicas | None = None
        self._folder: Path | None = None
        self.seconds = 0.0
        self.num_bytes = 0

    def take(self, trainer: Trainer, *, clock: int, is_good: bool = False, **extras: Any) -> None:
        """Take a snapshot of the current state, overwriting the oldest one. A full disk is logged: none is taken.

        Args:
            trainer: The trainer, at the end of a batch in which the optimizer has stepped.
            clock: Optimizer steps executed, including rolled-back ones.
            is_good: Whether the snapshot needs no quarantine.
            extras: Plain values to store with it.

        Raises:
            MisconfigurationException: `snapshot_storage` is `memory` and the snapshots do not fit.
        """
        began = time.perf_counter()
        if self._ring is None:
            self._replicas = find_replicas(trainer)
            self._ring = self._make_ring(trainer)
        snapshot, owners = self._ring.oldest(), dict[str, int]()
        if self._replicas is not None:
            owners = self._replicas.assign(live_tensors(trainer, writes_back=False), trainer.strategy.root_device)
        if not self._copy(trainer, snapshot, owners):
            return
        snapshot.scalars = live_scalars(trainer) | {"checkpoints": checkpoint_lists(trainer), "extras": extras}
        snapshot.scalars["owners"] = owners
        snapshot.step = trainer.global_step
        snapshot.taken_at = clock - self._quarantine_steps if is_good else clock
        self.num_bytes = snapshot.num_bytes
        self.seconds = time.perf_counter() - began

    def _copy(self, trainer: Trainer, snapshot: Snapshot, owners: dict[str, int]) -> bool:
        """Copy the tensors; return whether that succeeded on every rank. A collective if they are stored on disk."""
        tensors = self._own(live_tensors(trainer, writes_back=False), owners)
        if self._folder is None:
            snapshot.take(tensors)
            return True
        is_complete = False
        with tolerating(self._folder):
            snapshot.take(tensors)
            is_complete = True
        if all_ranks(is_complete, trainer.strategy.root_device):
            return True
        snapshot.drop()  # no rank may roll back to it
        return False

    def wait_until_copied(self) -> None:
        """Make the GPU, but not the host, wait for the copy; call it before the tensors change."""
        if self._ring is not None:
            self._ring.wait()

    def find(self, *, clock: int, oldest: bool) -> Snapshot | None:
        """Return the snapshot to roll back to; None if none is good.

        Args:
            clock: As for `take`.
            oldest: Whether to return the oldest snapshot instead of the newest good one.
        """
        if self._ring is None:
            return None
        good = self._ring.good(clock)
        return self._ring.held[0] if good is not None and oldest else good

    def restore(self, trainer: Trainer, snapshot: Snapshot, *, with_random: bool) -> dict[str, Any]:
        """Restore the train state of a snapshot and drop the newer ones.

        Args:
            trainer: The trainer, at the end of a batch in which the optimizer has stepped.
            snapshot: Snapshot returned by `find`; it can be restored again later.
            with_random: Whether to restore the RNG states as well.

        Returns:
            The `extras` stored with it.
        """
        assert self._ring is not None, "the snapshot is from this ring"
        self._ring.drop_after(snapshot)
        owners = snapshot.scalars["owners"]
        new = snapshot.restore(self._own(live_tensors(trainer, writes_back=True), owners))
        if self._replicas is not None:
            self._replicas.send(live_tensors(trainer, writes_back=True), owners)
        forget_tensors(trainer, new)
        restore_scalars(trainer, snapshot.scalars, with_random=with_random)
        restore_checkpoint_lists(trainer, snapshot.scalars["checkpoints"])
        extras: dict[str, Any] = snapshot.scalars["extras"]
        return extras

    def drop(self) -> None:
        """Free the memory and the disk space of all snapshots."""
        if self._ring is not None:
            self._ring.drop()
            self._ring = None
        if self._folder is not None and self._folder.is_dir():
            self._folder.rmdir()

    def _own(self, tensors: Iterable[tuple[str, Tensor]], owners: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that this rank keeps: those it owns and those without an owner."""
        for name, tensor in tensors:
            if self._replicas is None or owners.get(name, self._replicas.rank) == self._replicas.rank:
                yield name, tensor

    def _make_ring(self, trainer: Trainer) -> SnapshotRing:
        """Choose memory or disk, the same on all ranks, since the ranks of a node share its memory."""
        parent = Path(trainer.strategy.broadcast(str(output_folder(trainer))))
        folder = parent / FOLDER / f"rank_{trainer.global_rank}"
        in_memory = self._snapshot_storage != "disk" and self._fits(trainer, folder)
        self._folder = None if in_memory else folder
        return SnapshotRing(
            size=self._num_snapshots,
            quarantine_steps=self._quarantine_steps,
            folder=self._folder,
        )

    def _fits(self, trainer: Trainer, folder: Path) -> bool:
        available, of_node = available_bytes(), 0
        ranks = max(1, trainer.world_size // max(1, trainer.num_nodes))  # ranks per node
        for name, tensor in live_tensors(trainer, writes_back=False):
            is_kept_once = self._replicas is not None and is_shared(name, tensor, trainer.strategy.root_device)
            of_node += _get_copy_bytes(tensor) * self._num_snapshots * (1 if is_kept_once else ranks)
        # "auto" uses at most half of the free memory: data, checkpoints and other processes need some too
        fraction = 1.0 if self._snapshot_storage == "memory" else 0.5
        fits_here = available is None or of_node <= available * fraction
        fits = all_ranks(fits_here, trainer.strategy.root_device)
        if not fits and self._snapshot_storage == "memory":
            raise MisconfigurationException(
                f'LossSpikeRollback(snapshot_storage="memory"): {self._num_snapshots} snapshots need'
                f" {of_node / GIB:.1f} GiB per node, {(available or 0) / GIB:.1f} GiB are left;"
                " type snapshot_storage=disk"
            )
        if not fits and trainer.is_global_zero:
            left = "" if available is None else f" of {available / GIB:.1f} GiB left"
            log.warning(
                f"Snapshots for a rollback would need {of_node / GIB:.1f} GiB{left} in host memory:"
                f" storing them on disk instead, in {folder.parent}"
            )
        return fits


def _get_copy_bytes(tensor: Tensor) -> int:
    """Return the host memory that a copy takes; torch rounds pinned buffers up to a power of two."""
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_cuda and tensor.nbytes else tensor.nbytes
