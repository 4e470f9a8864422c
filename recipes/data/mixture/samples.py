"""Datasets and sample order of a mixture of sources.

Shapes: K sources, N samples, B samples of a batch, T tokens of a sample.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from recipes.data import SampleDataset
from recipes.data.batches import make_padding
from recipes.data.conversations.rows import pad_rows
from recipes.data.draws import has_draws
from recipes.data.mixture.stages import Stages
from recipes.data.order import Order, Positions, ShuffledOrder
from recipes.errors import ConfigError

_BLOCK = 1 << 20  # samples of a source that are counted at a time


class MixtureOrder(Order):
    """Position -> sample index, where the sources are concatenated.

    Each source has its own order, seeded by its name: adding a source or changing a weight changes when samples are
    used, but not their order within a source.

    Args:
        lengths: Number of samples by source.
        stages: Position -> source.
        seed: Seed of the run.
    """

    def __init__(self, lengths: Mapping[str, int], stages: Stages, *, seed: int) -> None:
        counts = list(lengths.values())
        self._firsts = np.cumsum([0, *counts[:-1]], dtype=np.int64)  # [K]
        self._stages = stages
        self._orders = [ShuffledOrder(count, _own_seed(seed, name)) for name, count in lengths.items()]

    @override
    def indices(self, positions: Positions) -> Positions:
        sources, had = self._stages.locate(positions.reshape(-1))
        found = np.empty_like(had)
        for k in np.unique(sources):
            of_source = sources == k
            found[of_source] = self._firsts[k] + self._orders[k].indices(had[of_source])
        return found.reshape(positions.shape)


def _own_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def find_no_images(parts: Sequence[SampleDataset]) -> dict[str, Tensor]:
    """Return what a sample without images has beside those with some: `images` [0, C, S, S]; nothing if none has any.

    Raises:
        ConfigError: The images of two sources differ in shape.
    """
    found = [getattr(part, "image_shape", None) for part in parts]
    shapes: set[tuple[int, ...]] = {shape for shape in found if shape is not None}
    if len(shapes) > 1:
        shown = " and ".join("x".join(map(str, shape)) for shape in sorted(shapes))
        reason = f"its sources have images of {shown}, and a model reads one shape"
        raise ConfigError("data=mixture", reason, "the same transform for all of them")
    return {"images": torch.zeros(0, *shapes.pop())} if shapes else {}


class MixedSamples(Dataset[dict[str, Tensor]]):
    """Concatenated training samples of all sources, each with `source`, the index of its source.

    Args:
        parts: Datasets by source name.
        stages: Position -> source.
    """

    def __init__(self, parts: Mapping[str, SampleDataset], stages: Stages) -> None:
        self.parts = parts
        self.stages = stages
        self._lasts = np.cumsum([len(part) for part in parts.values()])  # [K], one past the last sample
        self._by_number = list(parts.values())
        self._no_images = find_no_images(self._by_number)
        counts = {part.targets_per_sample for part in self._by_number}
        self.targets_per_sample = counts.pop() if len(counts) == 1 else None
        self.tokens_per_sample = max(part.tokens_per_sample for part in self._by_number)
        is_padded = len({part.tokens_per_sample for part in self._by_number}) > 1
        is_padded |= any(hasattr(part, "count_inputs") for part in self._by_number)
        # samples -> number of inputs of each, without padding; None if no sample is padded
        self.count_inputs: Callable[[Positions], Positions] | None = self._count_own_inputs if is_padded else None
        # samples -> number of images of each; None if no source has any among its tokens
        self.count_images: Callable[[Positions], Positions] | None = (
            self._count_own_images if any(map(_get_image_count, self._by_number)) else None
        )
        self._counted: dict[str, tuple[int, int]] = {}  # source -> samples and tokens of the last count
        self._draws = [has_draws(part) for part in self._by_number]
        # (index, rng) -> random sample; None if no source draws
        self.sample: Callable[[int, Generator], dict[str, Tensor]] | None = self._draw if any(self._draws) else None

    def __len__(self) -> int:
        return int(self._lasts[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample of its source, with `source`, [] int64."""
        source, own = self.locate(index)
        return self._no_images | self._by_number[source][own] | {"source": torch.tensor(source)}

    def _draw(self, index: int, rng: Generator) -> dict[str, Tensor]:
        """Return a sample of its source, drawn if the source draws."""
        source, own = self.locate(index)
        part: Any = self._by_number[source]
        sample: dict[str, Tensor] = part.sample(own, rng) if self._draws[source] else part[own]
        return self._no_images | sample | {"source": torch.tensor(source)}

    def padding(self) -> dict[str, Tensor]:
        """Return a sample without a loss, of the first source."""
        return self._no_images | make_padding(self._by_number[0]) | {"source": torch.tensor(0)}

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source of a sample and its index in that source."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        source = int(np.searchsorted(self._lasts, index, side="right"))
        return source, index - int(self._lasts[source]) + len(self._by_number[source])

    def make_order(self, seed: int) -> MixtureOrder:
        """Return the order of the stream."""
        lengths = {name: len(part) for name, part in self.parts.items()}
        return MixtureOrder(lengths, self.stages, seed=seed)

    def count_new(self) -> int:
        """Return the number of samples that the stream yields before the first repetition."""
        end = self.stages.find_end(np.array([len(part) for part in self._by_number]))
        return len(self) if end is None else end

    def count_epochs(self, position: int) -> dict[str, float]:
        """Return the number of epochs over each source before a position."""
        counts = self._count_before(position)
        return {name: counts[name] / len(part) for name, part in self.parts.items()}

    def _count_own_inputs(self, samples: Positions) -> Positions:
        return self._count(samples, _count_inputs)

    def _count_own_images(self, samples: Positions) -> Positions:
        return self._count(samples, _count_images)

    def _count(self, samples: Positions, count: Callable[[Any, Positions], Positions]) -> Positions:
        """Return a count of each sample, which its source has."""
        counts = np.empty_like(samples)
        sources = np.searchsorted(self._lasts, samples, side="right")
        for source in np.unique(sources):
            is_of, part = sources == source, self._by_number[source]
            counts[is_of] = count(part, samples[is_of] - (self._lasts[source] - len(part)))
        return counts

    def count_tokens(self, position: int, *, seed: int) -> dict[str, int]:
        """Return the tokens of each source before a position, without padding.

        Args:
            position: Samples consumed over all ranks.
            seed: Seed of the run.
        """
        return {
            name: self._count_tokens_of(name, num_samples, seed=seed)
            for name, num_samples in self._count_before(position).items()
        }

    def _count_tokens_of(self, name: str, num_samples: int, *, seed: int) -> int:
        """Return the tokens of the first samples of a source; continues the last count, else begins with the epoch."""
        part = self.parts[name]
        if not hasattr(part, "count_inputs"):
            return num_samples * part.tokens_per_sample
        begin, num_tokens = self._counted.get(name, (0, 0))
        epoch, _ = divmod(num_samples, len(part))
        if not epoch * len(part) <= begin <= num_samples:
            begin = epoch * len(part)
            num_tokens = epoch * int(_count_inputs(part, np.arange(len(part), dtype=np.int64)).sum())
        order = ShuffledOrder(len(part), _own_seed(seed, name))
        for first in range(begin, num_samples, _BLOCK):
            positions = np.arange(first, min(first + _BLOCK, num_samples), dtype=np.int64)
            num_tokens += int(_count_inputs(part, order.indices(positions)).sum())
        self._counted[name] = num_samples, num_tokens
        return num_tokens

    def _count_before(self, position: int) -> dict[str, int]:
        return dict(zip(self.parts, self.stages.count_before(position).tolist(), strict=True))


def _count_inputs(part: Any, samples: Positions) -> Positions:
    """Return the number of inputs of each sample of one source."""
    if hasattr(part, "count_inputs"):
        counts: Positions = part.count_inputs(samples)
        return counts
    return np.full(len(samples), part.tokens_per_sample, dtype=np.int64)


def _get_image_count(part: Any) -> Callable[[Positions], Positions] | None:
    count: Callable[[Positions], Positions] | None = getattr(part, "count_images", None)
    return count


def _count_images(part: Any, samples: Positions) -> Positions:
    """Return the number of images of each sample of one source."""
    count = _get_image_count(part)
    return np.zeros(len(samples), dtype=np.int64) if count is None else count(samples)


class MixedValidation(Dataset[dict[str, Tensor]]):
    """Validation samples of all sources with the weights of the last stage, without repetition.

    Their loss estimates the loss of the stream on new samples.

    Args:
        parts: Datasets by source name.
        stages: Only the last stage.
        num_samples: Maximum number of samples; None: until a source is exhausted.
    """

    def __init__(self, parts: Mapping[str, SampleDataset], stages: Stages, num_samples: int | None = None) -> None:
        self._parts = parts
        self._stages = stages
        self._by_number = list(parts.values())
        self._no_images = find_no_images(self._by_number)
        lengths = np.array([len(part) for part in self._by_number])  # [K]
        most = stages.find_end(lengths)
        assert most is not None, "in a single stage each source runs out"
        number = most if num_samples is None else min(num_samples, most)
        self._sources, had = stages.locate(np.arange(number, dtype=np.int64))  # [N] each
        used = np.maximum(stages.count_before(number), 1)  # [K]
        self._own = had * lengths[self._sources] // used[self._sources]  # [N], spread evenly over a source
        self.targets_per_sample = None
        self.tokens_per_sample = max(part.tokens_per_sample for part in self._by_number)

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample of its source, with `source`, [] int64."""
        source = int(self._sources[index])
        sample = self._by_number[source][int(self._own[index])]
        return self._no_images | sample | {"source": torch.tensor(source)}

    def padding(self) -> dict[str, Tensor]:
        """Return a sample without a loss, of the first source."""
        return self._no_images | make_padding(self._by_number[0]) | {"source": torch.tensor(0)}

    def spread(self, num_samples: int) -> "MixedValidation":
        """Return fewer samples with the same weights, evenly spaced in each source."""
        return MixedValidation(self._parts, self._stages, num_samples)


def collate(samples: Sequence[dict[str, Tensor]], *, seq_len: int) -> dict[str, Any]:
    """Return a batch of samples of several sources, padded to one length; all get positions if any sample has them.

    Args:
        samples: B samples with `inputs` and `targets` [T], `source` [], and optionally `positions` [T] and
            `num_inputs` []; and `images` [N, C, S, S] of all samples, if any source has images.
        seq_len: Maximum T.
    """
    has_positions = any("positions" in sample for sample in samples)
    rows = []
    for sample in samples:
        row = {name: values for name, values in sample.items() if name != "source"}
        if has_positions and "positions" not in row:
            row["positions"] = torch.arange(len(row["inputs"]))  # a single document
        rows.append(row)
    batch = pad_rows(rows, seq_len=seq_len)
    return batch | {"source": torch.stack([sample["source"] for sample in samples])}  # [B]
