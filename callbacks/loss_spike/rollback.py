"""Roll a run back to an in-process snapshot: one copy to take a snapshot, one to restore it."""

import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import Tensor

from ..files import tolerating
from ..logged_step import output_folder
from ..memory.host_memory import available_bytes
from ..ranks import all_ranks
from .checkpoint_list import checkpoint_lists, restore_checkpoint_lists
from .replicas import NodeReplicas, find_replicas, is_shared
from .snapshot import Snapshot, SnapshotRing
from .train_state import (
    forget_tensors,
    live_scalars,
    live_tensors,
    restore_scalars,
)

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
