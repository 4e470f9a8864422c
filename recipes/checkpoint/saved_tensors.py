"""Tensors of a checkpoint, read piece by piece from wherever they lie in it: each rank reads what it keeps."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from recipes.checkpoint.shard_file import _SHARDING_INFO, WHOLE_SHAPES, flat_start


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
