"""Datasets of tokenized examples, packed into rows or one per row.

Shapes: T tokens of a row, N tokens of an example; C channels and S x S pixels of an image.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from recipes.data.conversations.image_parts import ImageTokens
from recipes.data.conversations.store import ExampleStore
from recipes.data.image_file import BadImageError, decode, read_file
from recipes.errors import ConfigError
from recipes.numerics.loss import IGNORE_INDEX
from recipes.transform.images import ImageTransform

PAD_TO = 64  # padded rows are a multiple of this many tokens, because every distinct length is compiled separately


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of examples, always as a validation sees them: in a mirror image, left would be right.

    Attributes:
        tokens: That stand for an image.
        transform: What is made of an image, of which nothing is drawn.
    """

    tokens: ImageTokens
    transform: ImageTransform

    @property
    def shape(self) -> tuple[int, int, int]:
        """C, S and S."""
        size = self.transform.pixels.eval_size
        return self.transform.num_channels, size, size

    def read(self, store: ExampleStore, example: int, number: int) -> list[Tensor]:
        """Return the first images of an example, [C, S, S] float32 each.

        Raises:
            ConfigError: One cannot be decoded, or its file cannot be read.
        """
        fix = "another copy of the image, or the rows without it"
        return [
            self._decode(
                image.path, image.content, place=", ".join(filter(None, (store.place(example), image.path))), fix=fix
            )
            for image in store.images(example, number)
        ]

    def read_file(self, path: str, *, setting: str) -> Tensor:
        """Return the image in a file, [C, S, S] float32.

        Args:
            path: The file.
            setting: That named it, for errors.

        Raises:
            ConfigError: It cannot be read or decoded.
        """
        return self._decode(path, b"", place=f"{setting}={path}", fix=f"{setting}=<another copy of the image>")

    def _decode(self, path: str, content: bytes, *, place: str, fix: str) -> Tensor:
        try:
            data = read_file(Path(os.path.expanduser(path))) if path else content
            pixels = decode(data, self.transform.num_channels)
        except (BadImageError, OSError) as error:
            said = str(error) if isinstance(error, BadImageError) else f"it cannot be read: {error.strerror}"
            raise ConfigError(place, said, fix) from error
        sample: Tensor = self.transform(pixels).contiguous()
        return sample

    def stack(self, images: Sequence[Tensor]) -> Tensor:
        """Return images as one tensor, [N, C, S, S], also of none."""
        return torch.stack([*images]) if images else torch.zeros(0, *self.shape)


class ExampleRows(Dataset[dict[str, Tensor]]):
    """Rows of examples.

    An example of N tokens has N - 1 inputs, each with its successor as target if that has a loss: the first token is
    never a target, and no token predicts one of another example. Examples longer than `seq_len` are truncated, before
    an image that would be cut in two; examples left without a target are dropped.

    Args:
        store: All examples.
        examples: Indices of the examples in this split.
        seq_len: T.
        packs: Whether several examples share a row, each attending only to itself; False: one example per row.
        images: Reads the images of examples; None: they have none.

    Attributes:
        num_images: Images of all rows.
        num_images_cut: Images behind the end of examples that are truncated, which are not read.
        image_shape: C, S and S of an image; None: there are no images.
    """

    def __init__(
        self,
        store: ExampleStore,
        examples: NDArray[np.int64],
        *,
        seq_len: int,
        packs: bool,
        images: ImageReader | None = None,
    ) -> None:
        self.seq_len = seq_len
        self.targets_per_sample: int | None = None  # it varies
        self.tokens_per_sample = seq_len  # an upper limit for rows of one example
        self.packs = packs
        self._store = store
        self._images = images
        self.image_shape = None if images is None else images.shape
        lengths = store.lengths[examples] - 1  # inputs
        is_cut = lengths > seq_len
        num_targets = np.array(store.num_targets[examples])
        num_images = np.array(store.num_images[examples])
        for index in np.flatnonzero(is_cut):
            example = int(examples[index])
            lengths[index], num_images[index] = self._find_end(example)
            num_targets[index] = store.carries_loss(example, stop=int(lengths[index]) + 1)[1:].sum()
        has_targets = num_targets > 0
        self.num_targets = int(num_targets.sum())
        self.num_cut = int((is_cut & has_targets).sum())
        self.num_without_targets = int((~has_targets).sum())
        self.examples = examples[has_targets]
        lengths, num_images = lengths[has_targets], num_images[has_targets]
        self.num_images = int(num_images.sum())
        self.num_images_cut = int(store.num_images[self.examples].sum()) - self.num_images
        self.num_inputs = int(lengths.sum())
        order, self._starts = pack(lengths, row_length=seq_len) if packs else one_each(len(lengths))
        self._order = self.examples[order]
        # an empty split has no row to add up
        of_rows = np.add.reduceat(lengths[order], self._starts[:-1]) if len(order) else lengths
        self._lengths = of_rows.astype(np.int32)  # [R]
        images_before = np.concatenate([[0], np.cumsum(num_images[order])])
        self._num_images = np.diff(images_before[self._starts]).astype(np.int32)  # [R]
        # rows -> number of images of each; None if there are none
        self.count_images: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = (
            None if images is None else self._count_own_images
        )

    @property
    def num_examples(self) -> int:
        """Number of examples that are left."""
        return len(self.examples)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a row: `inputs`, `targets` and, if it is packed, `positions`, [T] int64 each, and `num_inputs`, [].

        Each example starts at position 0. The unused rest of a packed row is padding: it is an example of its own for
        attention, and not in `num_inputs`. Of examples with images there are `images`, [N, C, S, S] float32, too.
        """
        parts = self._parts_of(index)
        length = self.seq_len if self.packs else int(self._lengths[index])
        inputs = np.zeros(length, dtype=np.int64)
        targets = np.full(length, IGNORE_INDEX, dtype=np.int64)
        positions = np.zeros(length, dtype=np.int64)
        start, images = 0, list[Tensor]()
        for example, num_inputs, num_images in parts:
            tokens = self._store.tokens(example, stop=num_inputs + 1)
            carries_loss = self._store.carries_loss(example, stop=num_inputs + 1)
            stop = start + len(tokens) - 1
            inputs[start:stop] = tokens[:-1]
            targets[start:stop] = np.where(carries_loss[1:], tokens[1:], IGNORE_INDEX)
            positions[start:stop] = np.arange(stop - start)
            if self._images is not None:
                images += self._images.read(self._store, example, num_images)
            start = stop
        positions[start:] = np.arange(length - start)
        row = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        if self._images is not None:
            row["images"] = self._images.stack(images)
        if not self.packs:
            return row
        return row | {"positions": torch.from_numpy(positions), "num_inputs": torch.tensor(start)}

    def count_inputs(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of inputs of each row, without padding."""
        return self._lengths[rows].astype(np.int64)

    def _count_own_images(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._num_images[rows].astype(np.int64)

    def examples_of(self, index: int) -> list[int]:
        """Return the examples of a row, in order."""
        return [example for example, _, _ in self._parts_of(index)]

    def list_images(self, index: int) -> list[list[str]]:
        """Return the files of the images that are read of each example of a row, empty for those in its rows."""
        return [
            [image.path for image in self._store.images(example, number)]
            for example, _, number in self._parts_of(index)
        ]

    def _parts_of(self, index: int) -> list[tuple[int, int, int]]:
        """Return the examples of a row, in order, each with the inputs and images that are read of it."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        of_row = self._order[self._starts[index] : self._starts[index + 1]].tolist()
        return [(example, *self._find_end(example)) for example in of_row]

    def _find_end(self, example: int) -> tuple[int, int]:
        """Return how many inputs and images of an example are read, so that no image is cut in two."""
        num_inputs = min(self._store.length(example) - 1, self.seq_len)
        if self._images is None:
            return num_inputs, 0
        tokens = self._store.tokens(example, stop=num_inputs)
        return self._images.tokens.shorten(tokens), self._images.tokens.count(tokens)


def pad_rows(samples: Sequence[dict[str, Tensor]], *, seq_len: int) -> dict[str, Any]:
    """Return a batch of rows of different lengths, padded at the end to the longest, with `num_inputs` of each, [B].

    The length is a multiple of 64 tokens, or `seq_len`; attention is causal, so no token sees the padding. Of rows with
    images, see `join_images`.
    """
    longest = max(len(sample["inputs"]) for sample in samples)
    width = min(-(-longest // PAD_TO) * PAD_TO, seq_len)
    names = [name for name in samples[0] if name not in ("num_inputs", "images")]
    batch = {name: torch.zeros(len(samples), width, dtype=torch.int64) for name in names}  # [B, T]
    batch["targets"].fill_(IGNORE_INDEX)
    for row, sample in enumerate(samples):
        for name in names:
            batch[name][row, : len(sample[name])] = sample[name]
    num_inputs = [int(sample.get("num_inputs", len(sample["inputs"]))) for sample in samples]
    return batch | {"num_inputs": torch.tensor(num_inputs)} | join_images(samples)


def join_images(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return `images` [N, C, S, S] of all rows, one after the other, and `num_images` of each, [B].

    Without any, there is one of zeros, which no token reads: a model that is sharded has to run the same modules on
    every rank. Rows of text alone, which have no `images`, have nothing of this.
    """
    found = [sample["images"] for sample in samples if "images" in sample]
    if not found:
        return {}
    num_images = torch.tensor([len(sample["images"]) for sample in samples])
    images = torch.cat(found)
    return {"images": images if len(images) else images.new_zeros(1, *images.shape[1:]), "num_images": num_images}


# Pack examples into rows with best-fit decreasing, 1 us per example.
#
# Each example, longest first, goes into the fullest row that has room for it. Letters: N examples, R rows, L tokens per
# row.

Counts = NDArray[np.int64]


def pack(lengths: Counts, *, row_length: int) -> tuple[Counts, Counts]:
    """Distribute examples over rows.

    Args:
        lengths: [N], tokens per example, from 1 to L.
        row_length: L.

    Returns:
        Example indices row by row, [N], and the offset of each row in them, [R + 1].
    """
    assert lengths.size == 0 or (lengths.min() > 0 and lengths.max() <= row_length), "lengths that fit"
    row_of = np.empty(len(lengths), dtype=np.int64)  # [N]
    open_rows: list[list[int]] = [[] for _ in range(row_length + 1)]  # by remaining room
    rooms = 0  # bit r: a row with room r exists
    num_rows = 0
    for example in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[example])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # the lowest bit: the least room
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row = row_length, num_rows
            num_rows += 1
        row_of[example] = row
        if room > length:
            open_rows[room - length].append(row)
            rooms |= 1 << (room - length)
    order = np.argsort(row_of, kind="stable")  # [N]
    starts = np.zeros(num_rows + 1, dtype=np.int64)  # [R + 1]
    np.cumsum(np.bincount(row_of, minlength=num_rows), out=starts[1:])
    return order, starts


def one_each(num_examples: int) -> tuple[Counts, Counts]:
    """Return the result of `pack` for rows of one example each."""
    return np.arange(num_examples, dtype=np.int64), np.arange(num_examples + 1, dtype=np.int64)
