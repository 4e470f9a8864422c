"""Checkpoint tensors on disk: reads any box or flat range of a tensor from the shards that the ranks wrote.

Shards need not match those of the reading rank: strategy, number of ranks and mesh may have changed. Values that no run
saves, which a forged checkpoint may hold, are errors.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from recipes.checkpoint.shard_file import ROWS, SHARDING_INFO, UNSHARDED_SHAPES
from recipes.parallel.placement import cut_box

Sizes = tuple[int, ...]
# optimizer state that sums or averages squares, or counts: the root of a negative one would be NaN in the first step
_NEVER_NEGATIVE = frozenset(
    ("step", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "variance", "row_var", "col_var")
)


@dataclass(frozen=True, kw_only=True)
class SavedPart:
    """Shard of a tensor in one file.

    Attributes:
        offsets: Position of its first element in the unsharded tensor; a single index for a flattened tensor.
        shape: Shape of the shard, as long as `offsets`.
        dtype: Data type by its name in safetensors, `F32`.
        file: Open file.
        name: Name of the tensor in the file.
        first_row: First row of the shard among the rows that the file holds under this name.
    """

    offsets: Sizes
    shape: Sizes
    dtype: str
    file: Any
    name: str
    first_row: int = 0

    def load(self) -> Tensor:
        """Return the shard, memory-mapped."""
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor.narrow(0, self.first_row, self.shape[0]) if self.shape else tensor

    def find_range(self, unsharded_shape: Sizes) -> tuple[int, int] | None:
        """Return start and end (exclusive) in the flattened tensor; None if the shard is not contiguous in it."""
        if len(self.offsets) != len(unsharded_shape):
            [start] = self.offsets
        elif self.shape[1:] == unsharded_shape[1:]:
            start = self.offsets[0] * math.prod(unsharded_shape[1:]) if self.offsets else 0
        else:
            return None
        return start, start + math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor on disk.

    Attributes:
        name: Its name on disk.
        shape: Shape of the unsharded tensor.
        dtype: Data type by its name in safetensors, `F32`.
        is_checked: Whether values that no run saves are errors when they are read.
    """

    name: str
    shape: torch.Size
    dtype: str
    is_checked: bool = True
    _parts: list[SavedPart] = field(default_factory=list)

    def read(self) -> Tensor:
        """Read the unsharded tensor into newly allocated memory.

        Raises:
            ValueError: The checkpoint does not hold all of it, or values that no run saves.
        """
        return self.read_range(0, math.prod(self.shape)).view(self.shape)

    def read_range(self, start: int, stop: int) -> Tensor:
        """Read only elements `start` to `stop` of the flattened tensor into newly allocated memory.

        Raises:
            ValueError: The checkpoint does not hold all of them, or values that no run saves.
        """
        return self._check(self._read_range(start, stop))

    def read_box(self, offsets: Sizes, shape: Sizes) -> Tensor:
        """Read a box of the tensor into newly allocated memory.

        Raises:
            ValueError: The checkpoint does not hold all of it, or values that no run saves.
        """
        return self._check(self._read_box(offsets, shape))

    def _check(self, values: Tensor) -> Tensor:
        """Return values in host memory, after one pass over them."""
        if not self.is_checked or not values.is_floating_point() or not values.numel():
            return values
        least, most = values.aminmax()  # NaN if there is one; ten times as fast as isfinite
        if not (least.isfinite() and most.isfinite()):
            raise ValueError(f"{self.name} holds NaN or inf")
        kind, _, rest = self.name.partition("/")
        if kind == "optimizer" and rest.partition("/")[0] in _NEVER_NEGATIVE and least < 0:
            raise ValueError(f"{self.name} holds negative numbers")
        return values

    def _read_range(self, start: int, stop: int) -> Tensor:
        if stop <= start:  # in the dtype of the tensor
            return self._parts[0].load().reshape(-1)[:0].clone()
        if self._consists_of_ranges():
            return self._join_ranges(start, stop)
        # shards split columns: read the rows that enclose the range
        row_size = math.prod(self.shape[1:])
        first, last = start // row_size, -(-stop // row_size)
        rows = self._join_boxes((first, *[0] * (len(self.shape) - 1)), (last - first, *self.shape[1:]))
        return rows.reshape(-1)[start - first * row_size : stop - first * row_size].clone()

    def _read_box(self, offsets: Sizes, shape: Sizes) -> Tensor:
        if 0 in shape:
            return self._read_range(0, 0).view(shape)
        if not self._consists_of_ranges():
            return self._join_boxes(offsets, shape)
        if not shape:
            return self._join_ranges(0, 1).view(shape)
        row_size = math.prod(self.shape[1:])
        rows = self._join_ranges(offsets[0] * row_size, (offsets[0] + shape[0]) * row_size)
        box = cut_box(rows.view(shape[0], *self.shape[1:]), (0, *offsets[1:]), shape)
        return box.contiguous()

    def _consists_of_ranges(self) -> bool:
        return all(part.find_range(self.shape) is not None for part in self._parts)

    def _join_ranges(self, start: int, stop: int) -> Tensor:
        found = ((part.find_range(self.shape), part) for part in self._parts)
        overlapping = sorted(
            ((place, part) for place, part in found if place and max(place[0], start) < min(place[1], stop)),
            key=lambda item: item[0],
        )
        slices, position = [], start
        for (begin, end), part in overlapping:
            if begin > position:  # a gap: reported below
                break
            end = min(stop, end)
            slices.append(part.load().reshape(-1)[position - begin : end - begin])
            position = end
        if position < stop:
            raise ValueError(f"elements {position} to {stop} of {self.name} are not in the checkpoint")
        return torch.cat(slices)  # [stop - start], a copy

    def _join_boxes(self, offsets: Sizes, shape: Sizes) -> Tensor:
        out: Tensor | None = None
        num_found = 0
        for part in self._parts:
            common = _intersect(offsets, shape, part.offsets, part.shape)
            if common is None:
                continue
            begin, sizes = common
            loaded = part.load()
            out = loaded.new_empty(shape) if out is None else out
            within, held = (tuple(a - b for a, b in zip(begin, base, strict=True)) for base in (offsets, part.offsets))
            cut_box(out, within, sizes).copy_(cut_box(loaded, held, sizes))
            num_found += math.prod(sizes)
        if out is None or num_found != math.prod(shape):  # shards do not overlap: each element has one writer
            missing = math.prod(shape) - num_found
            raise ValueError(f"{missing} elements of {self.name}, {list(self.shape)}, are not in the checkpoint")
        return out


def _intersect(
    offsets: Sequence[int], shape: Sequence[int], other: Sequence[int], other_shape: Sequence[int]
) -> tuple[Sizes, Sizes] | None:
    """Return offsets and shape of the intersection of two boxes; None if it is empty."""
    begin = tuple(max(a, b) for a, b in zip(offsets, other, strict=True))
    ends = (min(a + n, b + m) for a, n, b, m in zip(offsets, shape, other, other_shape, strict=True))
    sizes = tuple(end - start for start, end in zip(begin, ends, strict=True))
    return None if min(sizes) <= 0 else (begin, sizes)


def open_tensors(files: Iterable[Path], *, are_checked: bool = True) -> dict[str, SavedTensor]:
    """Return every tensor in the files of a checkpoint by name; reads headers only.

    Args:
        files: Files with the shards.
        are_checked: Whether values that no run saves are errors when they are read.

    Raises:
        ValueError: Shards do not belong together, or one that the metadata of its file lists is not there.
    """
    tensors: dict[str, SavedTensor] = {}
    for path in files:
        for name, shape, part in _open_parts(path):
            tensor = tensors.setdefault(
                name, SavedTensor(name=name, shape=shape, dtype=part.dtype, is_checked=are_checked)
            )
            if tensor.dtype != part.dtype:
                raise ValueError(f"{path.name} has a shard of {name} of {part.dtype}, and others are {tensor.dtype}")
            if tensor.shape != shape or not _lies_within(part, shape):
                raise ValueError(f"{path.name} has a shard of {name} that lies outside of the tensor, {list(shape)}")
            tensor._parts.append(part)
    return tensors


def _lies_within(part: SavedPart, shape: torch.Size) -> bool:
    """Return whether a shard is a box of a tensor, or a range of the flattened one."""
    ends = [start + size for start, size in zip(part.offsets, part.shape, strict=True)]
    sizes = shape if len(part.offsets) == len(shape) else (math.prod(shape),)
    return all(start >= 0 and end <= size for start, end, size in zip(part.offsets, ends, sizes, strict=True))


def _open_parts(path: Path) -> Iterator[tuple[str, torch.Size, SavedPart]]:
    file: Any = safe_open(str(path), framework="pt")
    metadata: Mapping[str, str] = file.metadata()
    saved = json.loads(metadata[SHARDING_INFO])
    shapes = json.loads(metadata[UNSHARDED_SHAPES])
    rows = json.loads(metadata.get(ROWS, "{}"))
    if lost := sorted(shapes.keys() - file.keys()):
        raise ValueError(f"{path.name} lists {lost[0]}, and does not hold it")
    for name in file.keys():  # noqa: SIM118, not a dict
        unsharded = torch.Size(shapes[name])
        offsets = tuple(saved[name]["saved_offsets"])
        place = file.get_slice(name)
        shape, dtype = tuple(place.get_shape()), place.get_dtype()
        if name not in rows:
            yield name, unsharded, SavedPart(offsets=offsets, shape=shape, dtype=dtype, file=file, name=name)
            continue
        done = 0
        for first, count in rows[name]:
            box = SavedPart(
                offsets=(first, *offsets[1:]),
                shape=(count, *shape[1:]),
                dtype=dtype,
                file=file,
                name=name,
                first_row=done,
            )
            yield name, unsharded, box
            done += count
