"""Log peak memory of host and device: one system call and one all-reduce per logged step."""

import contextlib
import errno
import gc
import logging
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from ..files import replacing, write_atomically
from ..lightning_packages import Callback
from ..logged_step import StepCounter, is_logged_step, log_row, output_folder
from ..ranks import max_over_ranks
from .host_memory import available_bytes

log = logging.getLogger("lightning_recipes")
GIB = 2**30
FOLDER = "oom"


class MemoryMonitor(Callback):
    """Logs peak memory since process start, as the maximum over ranks; writes a memory dump on out-of-memory errors.

    Useful in every run, and for choosing `micro_batch_size`: it shows how much device memory is left.

    Logs `memory/host_peak_gib` (resident set of this process, excluding data workers) and, on CUDA,
    `memory/allocated_peak_gib`, `memory/reserved_peak_gib`, `memory/alloc_retries` and `memory/num_ooms`. The
    allocator's peak counters are never reset, so other code can still read the peak of the whole process. A resumed
    run starts with new peaks: there is no state to save.

    On an out-of-memory error, each affected rank writes a memory dump to `oom/` in the run folder.

    Args:
        record_history: Record the stack trace of every CUDA allocation for the dump; costs a few microseconds per
            allocation.

    Example:
        >>> monitor = MemoryMonitor(record_history=False)
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", logger=False)
        >>> monitor.summary()
        {'peak_memory_gib': None}
    """

    summary_fields: ClassVar[dict[str, Any]] = {"peak_memory_gib": None}

    def __init__(self, *, record_history: bool = False) -> None:
        super().__init__()
        self._record_history = record_history
        self._steps = StepCounter()
        self._peaks: dict[str, float] = {}  # at the last logged step

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
        except (OSError, RuntimeError, MemoryError) as error:  # writing the dump needs memory too
            log.warning(f"The memory dump could not be written: {error}")

    def summary(self) -> dict[str, float | None]:
        """Return the peak at the last logged step, in GiB: of device allocations, else of host memory."""
        for name in ("memory/allocated_peak_gib", "memory/host_peak_gib"):
            if name in self._peaks:
                return {"peak_memory_gib": self._peaks[name]}
        return {"peak_memory_gib": None}


def read_peaks(device: torch.device) -> dict[str, float]:
    """Return this rank's peaks so far, with the same names in the same order on every rank."""
    peaks = {}
    with contextlib.suppress(ImportError):  # not available on Windows
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
    """Convert `ru_maxrss` to bytes: getrusage(2) reports bytes on macOS and KiB on Linux."""
    return max_rss if platform == "darwin" else max_rss * 1024


# Write a memory dump after an out-of-memory error; takes about a second, once.

_MIB = 2**20
_NUM_TENSORS = 30
# matches messages of allocators, CUDA libraries, NCCL, Triton and the OS kernel
_FULL = re.compile(r"out of memory|_ALLOC_FAILED|can(no|')t allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an exception or one of its causes is an out-of-memory error of the device or host."""
    seen = set[int]()  # a cause may lead back to its effect: `raise error from error`
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and _FULL.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def write_dump(folder: Path, *, rank: int, error: BaseException) -> None:
    """Write `rank_00000.txt`: the failed allocation, free host memory and the largest tensors.

    On CUDA, also write the allocator's snapshot, `rank_00000.pickle`, for https://docs.pytorch.org/memory_viz.

    Raises:
        OSError: The folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"rank_{rank:05d}"
    parts = [str(error), _describe_host(), "The largest live tensors:", *_largest_tensors()]
    if torch.cuda.is_available():
        with replacing(folder / f"{name}.pickle") as unfinished:
            torch.cuda.memory._dump_snapshot(str(unfinished))
        parts.append(torch.cuda.memory_summary())
    write_atomically(folder / f"{name}.txt", "\n".join(parts) + "\n")


def _describe_host() -> str:
    free = available_bytes()
    return "" if free is None else f"Free host memory: {free / 2**30:.2f} GiB"


def _largest_tensors() -> list[str]:
    """Return one line per storage for the largest tensors that the garbage collector tracks."""
    found: dict[tuple[str, int], tuple[int, str]] = {}
    for candidate in gc.get_objects():
        # skip subclasses (DTensors, fake tensors): the plain tensors they wrap are found too
        if type(candidate) not in (Tensor, torch.nn.Parameter):
            continue
        if candidate.layout != torch.strided:
            continue
        storage = candidate.untyped_storage()
        size = storage.nbytes()
        line = f"{size / _MIB:10.1f} MiB  {candidate.device}  {candidate.dtype}  {list(candidate.shape)}"
        found[str(candidate.device), storage.data_ptr()] = (size, line)  # views share a storage
    largest = sorted(found.values(), reverse=True)[:_NUM_TENSORS]
    return [line for size, line in largest if size]
