"""The rows of a matrix of stacked parts, such as queries, keys and values, of which each rank has a share of every part.

On one device, and in every file, the rows are those of the first part, then those of the second, and so on. Cut into
N pieces, the first rank would have queries alone. So the N ranks hold the rows in another order: each its share of
the first part, then of the second.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


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
