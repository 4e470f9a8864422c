"""Peak memory of host and device: one system call per logged step, one all-reduce across ranks."""

import contextlib
import logging
import sys
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from ..logged_step import StepCounter, is_logged_step, log_row, output_folder
from ..ranks import max_over_ranks
from .dump import is_out_of_memory, write_dump

log = logging.getLogger("lightning_recipes")
GIB = 2**30
FOLDER = "oom"


class MemoryMonitor(Callback):
    """Logs peak memory since the process began, as the maximum over ranks; dumps what fills it when it runs out.

    Useful always, and to choose `micro_batch_size`: it shows how much of the device is left.

    `memory/host_peak_gib` (resident set of this process, without its data workers) always;
    `memory/allocated_peak_gib`, `memory/reserved_peak_gib`, `memory/alloc_retries` and `memory/num_ooms` on CUDA.
    The allocator's peak counters are read and never reset, so other readers keep the peak of the whole run. A peak
    belongs to a process: a resumed run starts new peaks, and there is no state to save.

    When memory runs out, each affected rank writes what filled it to `oom/` in the run folder.

    Args:
        record_history: Let CUDA's allocator record the stack of every allocation for that dump, which costs a few
            microseconds each.

    Example:
        >>> monitor = MemoryMonitor(record_history=False)
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", logger=False)
        >>> monitor.summary()
        {'peak_memory_gib': None}
    """

    summary_fields: ClassVar[dict[str, Any]] = {"peak_memory_gib": None}

    def __init__(self, *, record_history: bool = False) -> None:
        self._record_history = record_history
        self._steps = StepCounter()
        self._peaks: dict[str, float] = {}  # at the last row

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)
        if self._record_history and trainer.strategy.root_device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=100_000)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._steps.stepped(trainer)
        if is_logged_step(trainer):
            device = trainer.strategy.root_device
            self._peaks = max_over_ranks(read_peaks(device), device)
            log_row(pl_module, self._peaks)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not is_out_of_memory(exception):
            return
        try:
            write_dump(output_folder(trainer) / FOLDER, rank=trainer.global_rank, error=exception)
        except (OSError, RuntimeError, MemoryError) as error:  # writing it needs memory too
            log.warning(f"The memory dump could not be written: {error}")

    def summary(self) -> dict[str, float | None]:
        """Return the peak at the last row, in GiB: of the device's allocations, else of the host."""
        for name in ("memory/allocated_peak_gib", "memory/host_peak_gib"):
            if name in self._peaks:
                return {"peak_memory_gib": self._peaks[name]}
        return {"peak_memory_gib": None}


def read_peaks(device: torch.device) -> dict[str, float]:
    """Return this rank's peaks so far; every rank of a run returns the same names in the same order."""
    peaks = {}
    with contextlib.suppress(ImportError):  # Windows has no such module
        import resource

        max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peaks["memory/host_peak_gib"] = host_peak_bytes(max_rss, platform=sys.platform) / GIB
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        peaks["memory/allocated_peak_gib"] = stats["allocated_bytes.all.peak"] / GIB
        peaks["memory/reserved_peak_gib"] = stats["reserved_bytes.all.peak"] / GIB
        peaks["memory/alloc_retries"] = float(stats["num_alloc_retries"])
        peaks["memory/num_ooms"] = float(stats["num_ooms"])
    return peaks


def host_peak_bytes(max_rss: int, *, platform: str) -> int:
    """Return `ru_maxrss` in bytes: getrusage(2) counts in bytes on macOS and in KiB on Linux."""
    return max_rss if platform == "darwin" else max_rss * 1024
