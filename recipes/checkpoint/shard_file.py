"""Write one rank's tensors to a safetensors file in a single pass that also hashes and checks for NaN and inf.

The layout is that of torch's distributed checkpoints in safetensors (`HuggingFaceStorageWriter`): a shard starts at
its `saved_offsets`. ZeRO shards are ranges of the flattened tensor, so theirs is a single index. The rows of a shard
may come from several places (`recipes.parallel.placement`), which the file then lists.
"""

import errno
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from recipes.checkpoint.manifest import FileRecord
from recipes.files import sync

UNSHARDED_SHAPES = "unsharded_shapes"  # key in the header's metadata
ROWS = "rows"  # metadata key for shards with rows from several places
SHARDING_INFO = "DCP_SHARDING_INFO"  # torch.distributed.checkpoint._hf_utils, torch 2.13
_CHUNK_BYTES = 4 << 20  # stays in the cache while it is checked, hashed and written
DTYPES = {  # name in safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# exponent bits: all set only in inf and NaN (IEEE 754)
_EXPONENTS: dict[torch.dtype, tuple[Any, int]] = {
    torch.float64: (np.int64, 0x7FF0_0000_0000_0000),
    torch.float32: (np.int32, 0x7F80_0000),
    torch.float16: (np.int16, 0x7C00),
    torch.bfloat16: (np.int16, 0x7F80),
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """Shard of a tensor that one rank holds and writes.

    Attributes:
        tensor: A box of the tensor, a range of the flattened tensor, or all of it; on any device.
        offsets: Position of its first element in the unsharded tensor, one index per dimension of `tensor`.
        unsharded_shape: Shape of the unsharded tensor.
        constant: Whether its values do not change before the next optimizer step.
        rows: First row in the unsharded tensor and length of each group of rows; None if they are contiguous.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    unsharded_shape: torch.Size
    constant: bool = True
    rows: tuple[tuple[int, int], ...] | None = None


# --- write ---


def write_shard(path: Path, parts: Mapping[str, Part]) -> tuple[FileRecord, str | None]:
    """Write tensors in host memory to a new file and wait until they are on disk.

    Returns:
        Size and hash of the file, and the name of the first tensor with NaN or inf, None if there is none.

    Raises:
        OSError: The disk is full, failing or not writable.
    """
    # widest element first: each tensor then starts at a multiple of its own element size, so a reader may map it
    ordered = sorted(parts.items(), key=lambda item: -item[1].tensor.element_size())
    digest, not_finite, size = xxhash.xxh3_128(), None, 0
    _check_free_space(path, sum(part.tensor.nbytes for part in parts.values()))
    with path.open("xb", buffering=0) as file:
        for name, chunk, dtype in _get_chunks(ordered):
            digest.update(chunk)
            size += _write(file, chunk)
            if not_finite is None and name is not None and not _is_finite(chunk, dtype):
                not_finite = name
    sync(path)
    return FileRecord(bytes=size, xxh3_128=digest.hexdigest()), not_finite


def _check_free_space(path: Path, num_bytes: int) -> None:
    """Fail before the file fills a disk that others write to as well."""
    if shutil.disk_usage(path.parent).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _get_chunks(
    ordered: list[tuple[str, Part]],
) -> Iterator[tuple[str | None, memoryview, torch.dtype | None]]:
    """Yield the content of the file in order: the header, then each tensor in chunks, with name and dtype."""
    yield None, memoryview(_header(ordered)), None
    for name, part in ordered:
        if part.tensor.numel() == 0:
            continue
        flat: Any = part.tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(flat), _CHUNK_BYTES):
            yield name, memoryview(flat[start : start + _CHUNK_BYTES]), part.tensor.dtype


def _header(ordered: list[tuple[str, Part]]) -> bytes:
    """Return header length and JSON, padded so that the first tensor starts at a multiple of 8."""
    header: dict[str, Any] = {
        "__metadata__": {
            SHARDING_INFO: json.dumps({name: {"saved_offsets": list(part.offsets)} for name, part in ordered}),
            UNSHARDED_SHAPES: json.dumps({name: list(part.unsharded_shape) for name, part in ordered}),
        }
    }
    if rows := {name: part.rows for name, part in ordered if part.rows is not None}:
        header["__metadata__"][ROWS] = json.dumps(rows)
    start = 0
    for name, part in ordered:
        end = start + part.tensor.nbytes
        header[name] = {
            "dtype": DTYPES[part.tensor.dtype],
            "shape": list(part.tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write(file: Any, chunk: memoryview) -> int:
    """Write a whole chunk: a single unbuffered write may be partial."""
    done = 0
    while done < len(chunk):
        done += file.write(chunk[done:])
    return done


def _is_finite(chunk: memoryview, dtype: torch.dtype | None) -> bool:
    """Check with numpy: torch would start its thread pool alongside the training threads."""
    if dtype not in _EXPONENTS:
        return True
    kind, exponent = _EXPONENTS[dtype]
    bits = np.frombuffer(chunk, dtype=kind)
    return not bool(((bits & kind(exponent)) == kind(exponent)).any())
