"""Random samples: what a dataset draws depends on (seed, position) alone.

A dataset that draws has `sample(index, rng)` beside `__getitem__(index)`. The generator is made anew for every sample,
so equal positions draw equal numbers in any loader process, rank and micro-batch and after a resume, and other epochs,
which are at other positions, draw other numbers.

The generator is numpy's Philox, a counter-based one: its 128-bit key is (seed, position) itself, so no two positions
share a sequence, and it has no state to fill (2.6 us, one number 0.3 us more). A `torch.Generator` on the CPU takes
2.1 us, one number 2 us more, and reads only the lower 32 bits of its seed: two of 65,536 positions would probably draw
the same.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.random import Generator, Philox
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from recipes.errors import ConfigError

_WORD = (1 << 64) - 1
_PAIRS = (
    1 << 63
)  # added to the position of a pair, which draws other numbers than its first sample; positions are below


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
    """Samples of a dataset that draws, by (index, position); mixed in pairs where they are read as micro-batches.

    Args:
        dataset: Has `sample(index, rng)`, and perhaps `mix_pair(first, second, rng, position)`.
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

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """Return the samples of a micro-batch, each two neighbours mixed with each other if the dataset does that.

        Micro-batches of any even size hold the same pairs, whatever rank or loader process reads them.

        Raises:
            ConfigError: They are mixed, and one has no neighbour.
        """
        samples = [self[place] for place in places]
        mix_pair = getattr(self._dataset, "mix_pair", None)
        if mix_pair is None:
            return samples
        if len(samples) % 2:
            reason = "images are mixed in pairs, and the last one of a micro-batch has no partner"
            raise ConfigError(f"micro_batch_size={len(samples)}", reason, f"micro_batch_size={len(samples) + 1}")
        pairs = zip(samples[::2], samples[1::2], places[::2], strict=True)
        mixed = (mix_pair(*pair, rng_at(self._seed, _PAIRS | at), at) for *pair, (_, at) in pairs)
        return list(itertools.chain.from_iterable(mixed))
