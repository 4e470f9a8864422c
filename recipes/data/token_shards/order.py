"""Shuffled sample order that reads few files at a time, computed from the position: no shuffle buffer to checkpoint.

Shapes: F files, N samples in all files.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from typing_extensions import override

from recipes.data.order import Order, Positions, ShuffledOrder, mix64


class ShardOrder(Order):
    """Shuffles the files in each epoch, splits them into groups, and shuffles the samples within each group.

    Args:
        counts: [F], samples per file.
        num_open_shards: Files per group, that is, files read at once.
        seed: Seed of the run.
    """

    def __init__(self, counts: Sequence[int], *, num_open_shards: int, seed: int) -> None:
        self._counts = np.asarray(counts, dtype=np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts  # [F], first sample of each file
        self._num_samples = int(self._counts.sum())
        self._num_open_shards = num_open_shards
        self._seed = seed
        self._files = ShuffledOrder(len(counts), seed)
        # per process: the epochs that a batch may span
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    @override
    def indices(self, positions: Positions) -> Positions:
        flat = positions.reshape(-1)
        epochs, offsets = np.divmod(flat, self._num_samples)
        found = np.empty_like(flat)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            found[here] = self._in_epoch(epoch, offsets[here])
        return found.reshape(positions.shape)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_epoch"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> tuple[Positions, Positions]:
        """Return the file order of an epoch, [F], and the position in the epoch at which each file starts, [F]."""
        numbers = np.arange(len(self._counts), dtype=np.int64)
        files = self._files.indices(epoch * len(self._counts) + numbers)
        counts = self._counts[files]
        return files, np.cumsum(counts) - counts

    def _in_epoch(self, epoch: int, offsets: Positions) -> Positions:
        files, begins = self._epoch(epoch)
        groups = begins[:: self._num_open_shards]  # first position of each group
        numbers = np.searchsorted(groups, offsets, side="right") - 1
        found = np.empty_like(offsets)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            first = number * self._num_open_shards
            members = files[first : first + self._num_open_shards]
            counts = self._counts[members]
            order = ShuffledOrder(int(counts.sum()), self._group_seed(epoch, number))
            within = order.indices(offsets[here] - groups[number])
            ends = np.cumsum(counts)
            file = np.searchsorted(ends, within, side="right")
            found[here] = self._firsts[members[file]] + within - (ends - counts)[file]
        return found

    def _group_seed(self, epoch: int, group: int) -> int:
        key = np.array([self._seed & (2**63 - 1), epoch, group], dtype=np.uint64)
        return int(mix64(mix64(mix64(key[:1]) ^ key[1:2]) ^ key[2:])[0])
