"""Where in an unsharded tensor the elements are that a rank holds: a box, whose rows may be in an order of their own.

That order is the one of a matrix of stacked parts, such as queries, keys and values. On one device, and in every file,
its rows are those of the first part, then those of the second, and so on. Cut into N pieces, the first rank would have
queries alone. So the N ranks hold the rows in another order: each its share of the first part, then of the second.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def find_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and shape of this rank's part; a rank without a part has a size of 0."""
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(shape)


def cut_box(values: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Return a view of a box of a tensor."""
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        values = values.narrow(dim, min(offset, values.shape[dim]), size)
    return values


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """In which order N ranks hold the rows of a matrix of stacked parts.

    Attributes:
        sizes: Rows of each part.
        num_ranks: N, which divides each of them.
    """

    sizes: tuple[int, ...]
    num_ranks: int

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield first row in files, and number of rows, of each contiguous piece in the order of the ranks."""
        firsts = [0, *itertools.accumulate(self.sizes)]
        for rank in range(self.num_ranks):
            for first, size in zip(firsts, self.sizes, strict=False):
                share = size // self.num_ranks
                yield first + rank * share, share

    def to_ranks(self, values: Tensor) -> Tensor:
        """Return rows [R, ...] as in files in the order of the ranks."""
        return torch.cat([values[first : first + share] for first, share in self._pieces()])

    def find(self, start: int, num_rows: int) -> Iterator[tuple[int, int]]:
        """Yield where in files some rows of the ranks' order are: first row and number of rows of each piece."""
        position, stop = 0, start + num_rows
        for first, share in self._pieces():
            begin, end = max(start, position), min(stop, position + share)
            if begin < end:
                yield first + begin - position, end - begin
            position += share


def find_row_orders(module: nn.Module) -> dict[int, RowOrder]:
    """Return the orders of rows of a module's layers, by the `id` of a parameter.

    A layer keeps its order: engines replace parameters, and what is set on one is lost with it.
    """
    return {
        id(parameter): layer.row_order  # type: ignore[misc]
        for layer in module.modules()
        if hasattr(layer, "row_order")
        for parameter in layer.parameters(recurse=False)
    }
