"""What filled the memory, written down when it is full: a second, once."""

import errno
import gc
import re
from pathlib import Path

import torch
from torch import Tensor

from ..host_memory import available_bytes

_MIB = 2**20
_NUM_TENSORS = 30
# what allocators, CUDA's libraries, NCCL, Triton and the kernel say
_FULL = re.compile(r"out of memory|_ALLOC_FAILED|can(no|')t allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one behind it, says that memory is full: of a device or of the host."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and _FULL.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def write_picture(folder: Path, *, rank: int, error: BaseException) -> None:
    """`rank_00000.txt`: what was asked for, what there is, the largest tensors. On CUDA also `rank_00000.pickle`.

    The latter is the allocator's own snapshot, for https://docs.pytorch.org/memory_viz.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"rank_{rank:05d}"
    parts = [str(error), _host(), "The largest tensors that live:", *_largest_tensors()]
    if torch.cuda.is_available():
        snapshot = str(folder / f"{name}.pickle")
        torch.cuda.memory._dump_snapshot(snapshot)  # type: ignore[no-untyped-call]
        parts.append(torch.cuda.memory_summary())
    (folder / f"{name}.txt").write_text("\n".join(parts) + "\n")


def _host() -> str:
    free = available_bytes()
    return "" if free is None else f"Free memory of the host: {free / 2**30:.2f} GiB"


def _largest_tensors() -> list[str]:
    """One line each, of those that Python knows and that have memory of their own."""
    found: dict[tuple[str, int], tuple[int, str]] = {}
    for one in gc.get_objects():
        if not _is_tensor(one) or one.layout != torch.strided:
            continue
        storage = one.untyped_storage()
        size = storage.nbytes()
        what = f"{size / _MIB:10.1f} MiB  {one.device}  {one.dtype}  {list(one.shape)}"
        found[str(one.device), storage.data_ptr()] = (size, what)
    largest = sorted(found.values(), reverse=True)[:_NUM_TENSORS]
    return [what for size, what in largest if size]


def _is_tensor(one: object) -> bool:
    """A plain one: shards and fakes of other classes hold plain ones."""
    return type(one) in (Tensor, torch.nn.Parameter)
