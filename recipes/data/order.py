"""Sample order as a pure function of (seed, position): stateless, ~1 us per sample when vectorized."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

UInt64s = NDArray[np.uint64]
Positions = NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of SplitMix64
_WORD = (1 << 64) - 1
_NUM_ROUNDS = 8  # four suffice for large domains (Luby and Rackoff, 1988); small ones need more
_MIN_HALF_BITS = 4  # 16 values per half: with fewer, eight rounds generate too few permutations


def mix64(values: UInt64s) -> UInt64s:
    """Mix every bit into all 64 bits (finalizer of SplitMix64, doi 10.1145/2660193.2660195)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _seed_value(seed: int) -> UInt64s:
    """Return the seed as an array [1]: arithmetic on arrays wraps silently, on numpy scalars it warns."""
    return mix64(np.array([(seed + _GOLDEN) & _WORD], dtype=np.uint64))


class Order(ABC):
    """Position in an endless stream, counted from 0 over all epochs -> sample."""

    def __call__(self, position: int) -> int:
        """Return the sample at one position."""
        return int(self.indices(np.array([position], dtype=np.int64))[0])

    @abstractmethod
    def indices(self, positions: Positions) -> Positions:
        """Return the samples at an array of positions, in the same shape."""

    def draws(self, positions: Positions) -> Positions:
        """Return the positions whose random numbers the samples at these positions draw, in the same shape."""
        return positions

    def places(self, positions: Positions) -> Positions:
        """Return (index, position that it is drawn at) of the samples at an array of positions, [..., 2]."""
        return np.stack([self.indices(positions), self.draws(positions)], axis=-1)


class ShuffledOrder(Order):
    """A different permutation of all samples in every epoch.

    A Feistel network permutes [0, 4^k), the smallest such range with at least N values; a value of N or more is
    permuted again until it is below N, which keeps the result a permutation (cycle walking: Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002).

    Args:
        num_samples: N, samples in one epoch.
        seed: Any integer; two seeds give unrelated orders.

    Raises:
        ValueError: `num_samples` is below 1.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples}: an order needs samples; give at least 1")
        self.num_samples = num_samples
        self.seed = seed
        self._half_bits = max(_MIN_HALF_BITS, ((num_samples - 1).bit_length() + 1) // 2)

    @override
    def indices(self, positions: Positions) -> Positions:
        flat = positions.reshape(-1)
        assert flat.size == 0 or flat.min() >= 0, f"position {flat.min()} is before the stream"
        epochs, offsets = np.divmod(flat, self.num_samples)
        keys = mix64(_seed_value(self.seed) ^ mix64(epochs.astype(np.uint64)))
        values = self._permute(offsets.astype(np.uint64), keys)
        outside = np.flatnonzero(values >= self.num_samples)
        while outside.size:
            values[outside] = self._permute(values[outside], keys[outside])
            outside = outside[values[outside] >= self.num_samples]
        return values.astype(np.int64).reshape(positions.shape)

    def _permute(self, values: UInt64s, keys: UInt64s) -> UInt64s:
        """Permute [0, 4^half_bits), differently for every key; values and keys have the same shape."""
        half = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> half, values & mask
        for i in range(_NUM_ROUNDS):
            salt = np.uint64((i + 1) * _GOLDEN & _WORD)
            left, right = right, left ^ (mix64(right ^ mix64(keys ^ salt)) & mask)
        return (left << half) | right


class GroupedOrder(Order):
    """Several samples of each index one after the other, in blocks that are repeated.

    With two of each index in blocks of four that are read twice, a, b, c, d, … become a a b b, a a b b, c c d d,
    c c d d, …: a repeated block draws what it has drawn the first time.

    Args:
        order: Order of the indices.
        group_size: Samples of each index.
        block_size: Positions of a block.
        num_reads: Times that each block is read.
    """

    def __init__(self, order: Order, *, group_size: int, block_size: int, num_reads: int) -> None:
        assert min(group_size, block_size, num_reads) > 0, (group_size, block_size, num_reads)
        self._order = order
        self._group_size = group_size
        self._block_size = block_size
        self._num_reads = num_reads

    @override
    def indices(self, positions: Positions) -> Positions:
        return self._order.indices(self.draws(positions) // self._group_size)

    @override
    def draws(self, positions: Positions) -> Positions:
        blocks, offsets = np.divmod(positions, self._block_size)
        return blocks // self._num_reads * self._block_size + offsets


class RepeatedOrder(Order):
    """The beginning of a stream, repeated: position -> the sample at position modulo `period`, drawn as it was there.

    Args:
        order: Order of the stream.
        period: Positions after which the samples repeat.
    """

    def __init__(self, order: Order, *, period: int) -> None:
        assert period > 0, period
        self._order = order
        self._period = period

    @override
    def indices(self, positions: Positions) -> Positions:
        return self._order.indices(positions % self._period)

    @override
    def draws(self, positions: Positions) -> Positions:
        return self._order.draws(positions % self._period)
