"""One rank's tensors in one safetensors file, written in a single pass that also hashes and looks for NaN.

Laid out as torch's own distributed checkpoints in safetensors (`HuggingFaceStorageWriter`): what a file holds of a
tensor starts at its `saved_offsets`. Parts of ZeRO are ranges of the flattened tensor, so theirs are one number.
"""

import errno
import json
import math
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from recipes.checkpoint.manifest import FileRecord, sync

WHOLE_SHAPES = "whole_shapes"
_SHARDING_INFO = "DCP_SHARDING_INFO"  # torch.distributed.checkpoint._hf_utils, torch 2.13
_CHUNK_BYTES = 4 << 20  # stays in the cache while it is examined, hashed and written
_DTYPES = {
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
# bits of the exponent: all set in inf and NaN, in no other number (IEEE 754)
_EXPONENTS: dict[torch.dtype, tuple[Any, int]] = {
    torch.float64: (np.int64, 0x7FF0_0000_0000_0000),
    torch.float32: (np.int32, 0x7F80_0000),
    torch.float16: (np.int16, 0x7C00),
    torch.bfloat16: (np.int16, 0x7F80),
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank holds, and writes, of a tensor.

    Attributes:
        tensor: A slab of rows, or a flat range, or the whole; may lie on any device.
        offsets: Of its first element in the whole, one a dimension of `tensor`.
        unsharded_shape: Of the whole tensor.
        constant: Whether it keeps its values until the next optimizer step.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    unsharded_shape: torch.Size
    constant: bool = True


@dataclass(frozen=True, kw_only=True)
class Written:
    """A file on disk.

    Attributes:
        record: Its size and hash.
        not_finite: The first tensor with an infinite value or a NaN; None: there is none.
    """

    record: FileRecord
    not_finite: str | None


def write_shard(path: Path, parts: Mapping[str, Part]) -> Written:
    """Write tensors in host memory to a new file and wait until they are on the disk.

    Raises:
        OSError: The disk is full, failing or not ours.
    """
    # widest first: each then starts at a multiple of its own element
    ordered = sorted(parts.items(), key=lambda item: -item[1].tensor.element_size())
    digest, not_finite, size = xxhash.xxh3_128(), None, 0
    _refuse_if_full(path, sum(part.tensor.nbytes for part in parts.values()))
    with path.open("xb", buffering=0) as file:
        for name, chunk, dtype in _content(ordered):
            digest.update(chunk)
            size += _write(file, chunk)
            if not_finite is None and name is not None and not _is_finite(chunk, dtype):
                not_finite = name
    sync(path)
    record = FileRecord(bytes=size, xxh3_128=digest.hexdigest())
    return Written(record=record, not_finite=not_finite)


def _refuse_if_full(path: Path, num_bytes: int) -> None:
    """Before the file has taken the last byte of a disk that others write to as well."""
    if shutil.disk_usage(path.parent).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _content(
    ordered: list[tuple[str, Part]],
) -> Iterator[tuple[str | None, memoryview, torch.dtype | None]]:
    yield None, memoryview(_header(ordered)), None
    for name, part in ordered:
        if part.tensor.numel() == 0:
            continue
        flat: Any = part.tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(flat), _CHUNK_BYTES):
            yield name, memoryview(flat[start : start + _CHUNK_BYTES]), part.tensor.dtype


def _header(ordered: list[tuple[str, Part]]) -> bytes:
    """Length and JSON, padded so that the first tensor starts at a multiple of 8."""
    described: dict[str, Any] = {
        "__metadata__": {
            _SHARDING_INFO: json.dumps(
                {name: {"saved_offsets": list(part.offsets)} for name, part in ordered}
            ),
            WHOLE_SHAPES: json.dumps({name: list(part.unsharded_shape) for name, part in ordered}),
        }
    }
    start = 0
    for name, part in ordered:
        end = start + part.tensor.numel() * part.tensor.element_size()
        described[name] = {
            "dtype": _DTYPES[part.tensor.dtype],
            "shape": list(part.tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write(file: Any, chunk: memoryview) -> int:
    """An unbuffered write may take less than it was given."""
    done = 0
    while done < len(chunk):
        done += file.write(chunk[done:])
    return done


def _is_finite(chunk: memoryview, dtype: torch.dtype | None) -> bool:
    """By numpy: torch would start its threads beside those that train."""
    if dtype not in _EXPONENTS:
        return True
    kind, exponent = _EXPONENTS[dtype]
    bits = np.frombuffer(chunk, dtype=kind)
    return not bool(((bits & kind(exponent)) == kind(exponent)).any())


def flat_start(offsets: tuple[int, ...], unsharded_shape: torch.Size) -> int:
    """Position of a part's first element in the flattened whole; parts are ranges of it.

    Raises:
        ValueError: The part is cut along another dimension than the first.
    """
    if len(offsets) != len(unsharded_shape):
        [start] = offsets
        return start
    if any(offsets[1:]):
        raise ValueError(
            f"a part that starts at {offsets} of {list(unsharded_shape)} is no flat range"
        )
    return offsets[0] * math.prod(unsharded_shape[1:]) if offsets else 0


@dataclass(frozen=True, kw_only=True)
class _Piece:
    start: int  # in the flattened whole
    stop: int
    file: Any
    name: str


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor on disk.

    Attributes:
        shape: Of the whole.
    """

    shape: torch.Size
    _pieces: list[_Piece] = field(default_factory=list)

    def whole(self) -> Tensor:
        """All of it, in memory of its own."""
        return self.part(0, math.prod(self.shape)).view(self.shape)

    def part(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of the flattened tensor, in memory of their own. Reads only these.

        Raises:
            ValueError: The checkpoint does not hold all of them.
        """
        wanted = sorted(
            (piece for piece in self._pieces if max(piece.start, start) < min(piece.stop, stop)),
            key=lambda piece: piece.start,
        )
        if not wanted and stop > start:
            raise ValueError(f"elements {start} to {stop} of a tensor are not in the checkpoint")
        read, at = [], start
        for piece in wanted:
            if piece.start > at:
                break
            last = min(stop, piece.stop)
            whole = piece.file.get_tensor(piece.name).reshape(-1)  # mapped, not read
            read.append(whole[at - piece.start : last - piece.start])
            at = last
        if at < stop and stop > start:
            raise ValueError(f"elements {at} to {stop} of a tensor are not in the checkpoint")
        if not read:
            empty: Tensor = self._pieces[0].file.get_tensor(self._pieces[0].name).reshape(-1)[:0]
            return empty.clone()
        return torch.cat(read)


def open_tensors(files: Iterable[Path]) -> dict[str, SavedTensor]:
    """Every tensor in the files of a checkpoint, by name; nothing but headers is read."""
    found: dict[str, SavedTensor] = {}
    for path in files:
        for name, shape, piece in _pieces(path):
            tensor = found.setdefault(name, SavedTensor(shape=shape))
            tensor._pieces.append(piece)
    return found


def _pieces(path: Path) -> Iterator[tuple[str, torch.Size, _Piece]]:
    file: Any = safe_open(str(path), framework="pt")
    described: Mapping[str, str] = file.metadata()
    offsets = json.loads(described[_SHARDING_INFO])
    shapes = json.loads(described[WHOLE_SHAPES])
    for name in file.keys():  # noqa: SIM118, not a dict
        shape = torch.Size(shapes[name])
        start = flat_start(tuple(offsets[name]["saved_offsets"]), shape)
        stop = start + math.prod(file.get_slice(name).get_shape())
        yield name, shape, _Piece(start=start, stop=stop, file=file, name=name)
