"""Map a rank's shard to the unsharded tensor: a box, whose rows may be permuted.

Rows are permuted in a matrix of stacked parts, such as queries, keys and values. On one device, and in every file, the
parts follow each other. Split evenly over N ranks, the first rank would get only queries. So each of the N ranks holds
its fraction of the first part, then of the second, and so on.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.torch_internals import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, and any other tensor as it is."""
    shard: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return shard


def find_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and shape of this rank's shard; an empty shard has a size of 0."""
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(shape)


def cut_box(values: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Return a view of a box of a tensor."""
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        values = values.narrow(dim, min(offset, values.shape[dim]), size)
    return values


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """Row order of a matrix of stacked parts on N ranks.

    Attributes:
        sizes: Rows per part.
        num_ranks: N, which divides each size.
    """

    sizes: tuple[int, ...]
    num_ranks: int

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield first row in files and number of rows of each contiguous piece, in rank order."""
        firsts = [0, *itertools.accumulate(self.sizes)]
        for rank in range(self.num_ranks):
            for first, size in zip(firsts, self.sizes, strict=False):
                share = size // self.num_ranks
                yield first + rank * share, share

    def to_ranks(self, values: Tensor) -> Tensor:
        """Permute rows [R, ...] from file order to rank order."""
        return torch.cat([values[first : first + share] for first, share in self._pieces()])

    def find(self, start: int, num_rows: int) -> Iterator[tuple[int, int]]:
        """Map rows in rank order to file order; yield first row and number of rows of each contiguous piece."""
        position, stop = 0, start + num_rows
        for first, share in self._pieces():
            begin, end = max(start, position), min(stop, position + share)
            if begin < end:
                yield first + begin - position, end - begin
            position += share


def find_row_orders(module: nn.Module) -> dict[int, RowOrder]:
    """Return the row orders of a module's parameters by `id`.

    The order is stored on the layer: engines replace parameters, and attributes of a parameter would be lost.
    """
    layers: Iterator[Any] = module.modules()
    return {
        id(parameter): layer.row_order
        for layer in layers
        if hasattr(layer, "row_order")
        for parameter in layer.parameters(recurse=False)
    }
