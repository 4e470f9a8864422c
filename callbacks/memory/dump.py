"""Write a memory dump after an out-of-memory error; takes about a second, once."""

import errno
import gc
import re
from pathlib import Path

import torch
from torch import Tensor

from ..files import replacing, write_atomically
from .host_memory import available_bytes

_MIB = 2**20
_NUM_TENSORS = 30
# matches messages of allocators, CUDA libraries, NCCL, Triton and the OS kernel
_FULL = re.compile(r"out of memory|_ALLOC_FAILED|can(no|')t allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an exception or one of its causes is an out-of-memory error of the device or host."""
    while error is not None:
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
            torch.cuda.memory._dump_snapshot(str(unfinished))  # type: ignore[no-untyped-call]
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
