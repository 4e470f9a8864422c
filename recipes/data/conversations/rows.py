"""Datasets of tokenized examples, packed into rows or one per row.

Shapes: T tokens of a row, N tokens of an example.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from recipes.data.conversations.store import ExampleStore
from recipes.numerics.loss import IGNORE_INDEX

PAD_TO = 64  # padded rows are a multiple of this many tokens, because every distinct length is compiled separately


class ExampleRows(Dataset[dict[str, Tensor]]):
    """Rows of examples.

    An example of N tokens has N - 1 inputs, each with its successor as target if that has a loss: the first token is
    never a target, and no token predicts one of another example. Examples longer than `seq_len` are truncated;
    examples left without a target are dropped.

    Args:
        store: All examples.
        examples: Indices of the examples in this split.
        seq_len: T.
        packs: Whether several examples share a row, each attending only to itself; False: one example per row.
    """

    def __init__(self, store: ExampleStore, examples: NDArray[np.int64], *, seq_len: int, packs: bool) -> None:
        self.seq_len = seq_len
        self.targets_per_sample: int | None = None  # it varies
        self.tokens_per_sample = seq_len  # an upper limit for rows of one example
        self.packs = packs
        self._store = store
        lengths = store.lengths[examples] - 1  # inputs
        is_cut = lengths > seq_len
        num_targets = np.array(store.num_targets[examples])
        for index in np.flatnonzero(is_cut):
            num_targets[index] = store.carries_loss(int(examples[index]), stop=seq_len + 1)[1:].sum()
        has_targets = num_targets > 0
        self.num_targets = int(num_targets.sum())
        self.num_cut = int((is_cut & has_targets).sum())
        self.num_without_targets = int((~has_targets).sum())
        self.examples = examples[has_targets]
        lengths = np.minimum(lengths[has_targets], seq_len)
        self.num_inputs = int(lengths.sum())
        order, self._starts = pack(lengths, row_length=seq_len) if packs else one_each(len(lengths))
        self._order = self.examples[order]
        # an empty split has no row to add up
        of_rows = np.add.reduceat(lengths[order], self._starts[:-1]) if len(order) else lengths
        self._lengths = of_rows.astype(np.int32)  # [R]

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
        attention, and not in `num_inputs`.
        """
        examples = self.examples_of(index)
        length = self.seq_len if self.packs else int(self._lengths[index])
        inputs = np.zeros(length, dtype=np.int64)
        targets = np.full(length, IGNORE_INDEX, dtype=np.int64)
        positions = np.zeros(length, dtype=np.int64)
        start = 0
        for example in examples:
            tokens = self._store.tokens(example, stop=self.seq_len + 1)
            carries_loss = self._store.carries_loss(example, stop=self.seq_len + 1)
            stop = start + len(tokens) - 1
            inputs[start:stop] = tokens[:-1]
            targets[start:stop] = np.where(carries_loss[1:], tokens[1:], IGNORE_INDEX)
            positions[start:stop] = np.arange(stop - start)
            start = stop
        positions[start:] = np.arange(length - start)
        row = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        if not self.packs:
            return row
        return row | {"positions": torch.from_numpy(positions), "num_inputs": torch.tensor(start)}

    def count_inputs(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of inputs of each row, without padding."""
        return self._lengths[rows].astype(np.int64)

    def examples_of(self, index: int) -> list[int]:
        """Return the examples of a row, in order."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        found: list[int] = self._order[self._starts[index] : self._starts[index + 1]].tolist()
        return found


def pad_rows(samples: Sequence[dict[str, Tensor]], *, seq_len: int) -> dict[str, Any]:
    """Return a batch of rows of different lengths, padded at the end to the longest, with `num_inputs` of each, [B].

    The length is a multiple of 64 tokens, or `seq_len`; attention is causal, so no token sees the padding.
    """
    longest = max(len(sample["inputs"]) for sample in samples)
    width = min(-(-longest // PAD_TO) * PAD_TO, seq_len)
    names = [name for name in samples[0] if name != "num_inputs"]
    batch = {name: torch.zeros(len(samples), width, dtype=torch.int64) for name in names}  # [B, T]
    batch["targets"].fill_(IGNORE_INDEX)
    for row, sample in enumerate(samples):
        for name in names:
            batch[name][row, : len(sample[name])] = sample[name]
    num_inputs = [int(sample.get("num_inputs", len(sample["inputs"]))) for sample in samples]
    return batch | {"num_inputs": torch.tensor(num_inputs)}


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
