"""A run that goes back to an earlier state of its own, without ending: one copy to take it, one to put it back."""

import logging
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import Tensor

from ..host_memory import available_bytes
from ..logged_step import run_folder
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
    """Takes snapshots of a Trainer and goes back to one of them.

    Args:
        num_snapshots: How many are kept.
        quarantine_steps: Steps without a rollback after which one is good.
        snapshot_storage: `memory`, `disk` or `auto`: memory where they fit.
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
        self._folder: Path | None = None
        self.seconds = 0.0  # of the newest snapshot
        self.num_bytes = 0  # of it, on this rank

    def take(self, trainer: Trainer, *, clock: int, is_good: bool = False, **beside: Any) -> None:
        """A snapshot of now.

        Args:
            trainer: At the end of a batch in which the optimizer has stepped.
            clock: Optimizer steps made, never going back.
            is_good: Whether it needs no quarantine.
            beside: Plain values to be kept with it.
        """
        began = time.perf_counter()
        if self._ring is None:
            self._ring = self._make_ring(trainer)
        snapshot = self._ring.oldest()
        snapshot.take(live_tensors(trainer, writes_back=False))
        snapshot.numbers = live_scalars(trainer) | {"beside": beside}
        snapshot.step = trainer.global_step
        snapshot.taken_at = clock - self._quarantine_steps if is_good else clock
        self.num_bytes = snapshot.num_bytes
        self.seconds = time.perf_counter() - began

    def wait_until_copied(self) -> None:
        """Before tensors change; the GPU waits, the host does not."""
        if self._ring is not None:
            self._ring.wait()

    def find(self, *, clock: int, furthest: bool) -> Snapshot | None:
        """Where to go back to; None: there is nothing good.

        Args:
            clock: As for `take`.
            furthest: The oldest; else the newest that is good.
        """
        if self._ring is None:
            return None
        good = self._ring.good(clock)
        return self._ring.held[0] if good is not None and furthest else good

    def go_back(self, trainer: Trainer, snapshot: Snapshot) -> dict[str, Any]:
        """Put everything back as it was; what was kept beside it.

        Args:
            trainer: At the end of a batch in which the optimizer has stepped.
            snapshot: From `find`; it can be gone back to again.
        """
        assert self._ring is not None, "a snapshot comes out of it"
        self._ring.forget_after(snapshot)
        new = snapshot.put_back(live_tensors(trainer, writes_back=True))
        forget_tensors(trainer, new)
        restore_scalars(trainer, snapshot.numbers)
        beside: dict[str, Any] = snapshot.numbers["beside"]
        return beside

    def drop(self) -> None:
        """Give memory and disk back."""
        if self._ring is not None:
            self._ring.drop()
            self._ring = None
        if self._folder is not None and self._folder.is_dir():
            self._folder.rmdir()

    def _make_ring(self, trainer: Trainer) -> SnapshotRing:
        """All ranks decide alike: those of a node need its memory together."""
        folder = _folder(trainer)
        in_memory = self._snapshot_storage != "disk" and self._fits(trainer, folder)
        self._folder = None if in_memory else folder
        return SnapshotRing(
            size=self._num_snapshots,
            quarantine_steps=self._quarantine_steps,
            folder=self._folder,
        )

    def _fits(self, trainer: Trainer, folder: Path) -> bool:
        tensors = live_tensors(trainer, writes_back=False)
        needed = sum(_bytes_of_copy(tensor) for _, tensor in tensors)
        available = available_bytes()
        of_node = needed * self._num_snapshots * _ranks_of_node(trainer)
        # by itself only half of what is left: data, checkpoints and other processes need some too
        share = 1.0 if self._snapshot_storage == "memory" else 0.5
        fits = _all_ranks(available is None or of_node <= available * share, trainer)
        if not fits and self._snapshot_storage == "memory":
            raise MisconfigurationException(
                f"callbacks.loss_spike.snapshot_storage=memory: {self._num_snapshots} snapshots take"
                f" {of_node / GIB:.1f} GiB of a node, {(available or 0) / GIB:.1f} are left;"
                " type callbacks.loss_spike.snapshot_storage=disk"
            )
        if not fits and trainer.is_global_zero:
            left = "" if available is None else f" of {available / GIB:.1f} GiB left"
            log.warning(
                f"Snapshots for a rollback would take {of_node / GIB:.1f} GiB{left} in host memory:"
                f" they are kept on disk, in {folder.parent}"
            )
        return fits


def _bytes_of_copy(tensor: Tensor) -> int:
    """Pinned memory, which a GPU is copied to, comes in powers of two."""
    return (
        1 << (tensor.nbytes - 1).bit_length() if tensor.is_cuda and tensor.nbytes else tensor.nbytes
    )


def _folder(trainer: Trainer) -> Path:
    parent = run_folder(trainer) or Path(trainer.default_root_dir)
    return Path(trainer.strategy.broadcast(str(parent))) / FOLDER / f"rank_{trainer.global_rank}"


def _ranks_of_node(trainer: Trainer) -> int:
    return max(1, trainer.world_size // max(1, trainer.num_nodes))


def _all_ranks(mine: bool, trainer: Trainer) -> bool:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return mine
    flag = torch.tensor(float(mine), device=trainer.strategy.root_device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)
