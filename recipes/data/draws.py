"""Random samples: what a dataset draws depends on (seed, position) alone.

A dataset that draws has `sample(index, rng)` beside `__getitem__(index)`. The generator is made anew for every sample,
so equal positions draw equal numbers in any loader process, rank and micro-batch and after a resume, and other epochs,
which are at other positions, draw other numbers.

The generator is numpy's Philox, a counter-based one: its 128-bit key is (seed, position) itself, so no two positions
share a sequence, and it has no state to fill (2.6 us, one number 0.3 us more). A `torch.Generator` on the CPU takes
2.1 us, one number 2 us more, and reads only the lower 32 bits of its seed: two of 65,536 positions would probably draw
the same.
"""

from typing import Any

import numpy as np
from numpy.random import Generator, Philox
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

_WORD = (1 << 64) - 1


class _Key(ISeedSequence):
    """The key of a Philox generator as it is: `Philox(key=…)` takes 5 us longer, to read entropy that it drops."""

    def __init__(self, seed: int, position: int) -> None:
        self._words = np.array([seed & _WORD, position], dtype=np.uint64)  # [2]

    @override
    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        assert (n_words, dtype) == (2, np.uint64), (n_words, dtype)
        return self._words


def rng_at(seed: int, position: int) -> Generator:
    """Return the generator of the sample at a position of the stream.

    Args:
        seed: Seed of the run.
        position: Position in the stream, counted from 0 over all epochs; of `Order.draws` where the stream repeats.
    """
    key: Any = _Key(seed, position)  # numpy documents `ISeedSequence` here, its stubs leave it out
    return Generator(Philox(key))


def has_draws(dataset: object) -> bool:
    """Return whether the samples of a dataset are random."""
    return getattr(dataset, "sample", None) is not None


class DrawnSamples(Dataset[dict[str, Tensor]]):
    """Samples of a dataset that draws, by (index, position).

    Args:
        dataset: Has `sample(index, rng)`.
        seed: Seed of the run.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, place: tuple[int, int]) -> dict[str, Tensor]:
        """Return the sample of an index, as it is drawn at a position."""
        index, position = place
        sample: dict[str, Tensor] = self._dataset.sample(index, rng_at(self._seed, position))
        return sample
