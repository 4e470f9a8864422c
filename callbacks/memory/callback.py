"""Peak memory of host and device: one system call per logged step, one all-reduce across ranks."""

import logging
import resource
import sys
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from ..logged_step import StepCounter, is_logged_step, log_row, run_folder
from .dump import is_out_of_memory, write_picture

log = logging.getLogger("lightning_recipes")
GIB = 2**30
FOLDER = "oom"


class MemoryMonitor(Callback):
    """Logs the peaks since the process began, as the maximum over ranks.

    `memory/host_peak_gib` (resident set, this process without its data workers) always;
    `memory/allocated_peak_gib`, `memory/reserved_peak_gib`, `memory/alloc_retries` and `memory/num_ooms` on
    CUDA. The allocator's peak counters are read and never reset: other readers keep the whole run's peak.
    A peak belongs to a process, so a resumed run begins with fresh ones; there is no state to save.

    Where memory runs out, each rank that it happens to leaves what filled it in `oom/` of the run folder.

    Args:
        record_history: Whether CUDA's allocator keeps the stack of every allocation for that picture: some
            microseconds each.
    """

    def __init__(self, *, record_history: bool = False) -> None:
        self._record_history = record_history
        self._steps = StepCounter()
        self._peaks: dict[str, float] = {}  # at the last row

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)
        if self._record_history and trainer.strategy.root_device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=100_000)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._steps.stepped(trainer) and is_logged_step(trainer):
            device = trainer.strategy.root_device
            self._peaks = max_over_ranks(read_peaks(device), device)
            log_row(pl_module, self._peaks)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        folder = run_folder(trainer)
        if folder is None or not is_out_of_memory(exception):
            return
        try:
            write_picture(folder / FOLDER, rank=trainer.global_rank, error=exception)
        except (OSError, RuntimeError, MemoryError) as error:  # there is little left to do it with
            log.warning(f"what filled the memory could not be written: {error}")

    def summary(self) -> dict[str, float | None]:
        """The peak at the last row: of the device's allocations, or of the host where there is none."""
        for name in ("memory/allocated_peak_gib", "memory/host_peak_gib"):
            if name in self._peaks:
                return {"peak_memory_gib": self._peaks[name]}
        return {"peak_memory_gib": None}


def read_peaks(device: torch.device) -> dict[str, float]:
    """This rank's peaks so far; every rank of a run gives the same names in the same order."""
    peaks = {
        "memory/host_peak_gib": host_peak_bytes(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, platform=sys.platform
        )
        / GIB
    }
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        peaks["memory/allocated_peak_gib"] = stats["allocated_bytes.all.peak"] / GIB
        peaks["memory/reserved_peak_gib"] = stats["reserved_bytes.all.peak"] / GIB
        peaks["memory/alloc_retries"] = float(stats["num_alloc_retries"])
        peaks["memory/num_ooms"] = float(stats["num_ooms"])
    return peaks


def host_peak_bytes(max_rss: int, *, platform: str) -> int:
    """`ru_maxrss` in bytes: getrusage(2) counts in bytes on macOS and in KiB on Linux."""
    return max_rss if platform == "darwin" else max_rss * 1024


def max_over_ranks(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Each value's maximum over all ranks: one all-reduce of a few numbers, on every rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return values
    packed = torch.tensor(list(values.values()), device=device)  # [number of values], float32
    dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    return dict(zip(values, packed.tolist(), strict=True))
