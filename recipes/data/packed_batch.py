"""Rows of a batch without their padding: several share a row for the model, and are apart again after it.

The batch stays what it is, one row for each text, so that nothing that counts, divides or looks up knows of it. What is
packed is a forward pass: `plan_packing` decides on the host where each token goes, `pack_tokens` gathers the rows of
the model, in which a text attends to itself alone, and `unpack` brings values per token back. Texts that begin alike
may be branches of one (`plan_branches`).

Shapes: R rows of T + 1 tokens as they are, with room for the token that follows the last input; P packed rows of W.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NotRequired, TypedDict, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.data.conversations.rows import PAD_TO, Counts, pack

_NUM_WIDTHS = 8  # that are tried
_MOST_MORE = 1.03  # tokens that a narrower plan may have


class Packing(TypedDict):
    """Where tokens are, int64 each.

    Attributes:
        cells: [P, W], for each packed token its place in the flattened rows, R (T + 1). What is left of a packed row
            repeats tokens of the first rows, as texts of their own, and nothing reads them.
        places: [R, T + 1], for each token its place in the flattened packed rows, P W; 0 for padding.
        branches: [P, W], for each packed token which of the rows that share their beginning it is of, from 1; 0: it is
            of the beginning, or of no such row.
    """

    cells: Tensor
    places: Tensor
    branches: NotRequired[Tensor]


def plan_packing(num_inputs: Counts, *, width: int, seq_len: int) -> Packing:
    """Distribute rows over packed rows of at most `seq_len` tokens, as narrow as few tokens in all allow.

    Args:
        num_inputs: [R], inputs of each row. The token after them is packed, too, if there is room: a score reads it.
        width: T.
        seq_len: Most tokens of a packed row.
    """
    lengths = np.minimum(num_inputs + 1, seq_len)  # [R]
    longest = int(lengths.max())
    limits = np.linspace(longest, max(longest, min(seq_len, int(lengths.sum()))), _NUM_WIDTHS).astype(np.int64)
    plans = []
    for limit in np.unique(limits).tolist():
        order, starts = pack(lengths, row_length=min(_round_up(limit), seq_len))
        fills = np.add.reduceat(lengths[order], starts[:-1])  # [P]
        plans.append((min(_round_up(int(fills.max())), seq_len), order, starts))
    fewest = min(num_columns * (len(starts) - 1) for num_columns, _, starts in plans)
    # attention costs the square of the width
    num_columns, order, starts = next(plan for plan in plans if plan[0] * (len(plan[2]) - 1) <= _MOST_MORE * fewest)
    cells = np.tile(np.arange(num_columns, dtype=np.int64), (len(starts) - 1, 1))  # [P, W]
    places = np.zeros((len(lengths), width + 1), dtype=np.int64)
    for packed, (first, end) in enumerate(pairwise(starts.tolist())):
        column = 0
        for row in order[first:end].tolist():
            length = int(lengths[row])
            cells[packed, column : column + length] = row * (width + 1) + np.arange(length)
            places[row, :length] = packed * num_columns + np.arange(column, column + length)
            column += length
        cells[packed, column:] -= column  # begins at position 0
    return {"cells": torch.from_numpy(cells), "places": torch.from_numpy(places)}


def plan_branches(
    num_inputs: Counts, num_shared: Counts, groups: Counts, *, width: int, pad_to: int, break_even: int
) -> Packing | None:
    """Lay rows that begin alike into one packed row, in which the model reads their beginning once.

    A mask makes attention cost the square of the packed row, so there may be fewer of them in it than begin alike.

    Args:
        num_inputs: [R], inputs of each row, at least one more than it shares.
        num_shared: [R], inputs at its beginning that it shares with the rows of its group.
        groups: [R], equal for rows that follow each other and begin alike.
        width: T.
        pad_to: A packed row has a multiple of so many tokens.
        break_even: Length of a packed row at which attention costs as much as all else that a token takes.

    Returns:
        None: the rows as they are cost less.
    """
    runs = [[*rows] for _, rows in groupby(range(len(groups)), key=groups.__getitem__)]
    largest = max(map(len, runs))
    # as they are, attention is causal, and takes half of the products
    lowest, chosen = len(groups) * width * (1 + width / 2 / break_even), None
    for most in {min(2**power, largest) for power in range(1, largest.bit_length() + 1)} - {1}:
        units = [run[first : first + most] for run in runs for first in range(0, len(run), most)]
        lengths = [int(num_shared[unit[0]] + (num_inputs - num_shared)[unit].sum()) for unit in units]
        num_columns = -(-max(lengths) // pad_to) * pad_to
        cost = len(units) * num_columns * (1 + num_columns / break_even)
        if cost < lowest:
            lowest, chosen = cost, (units, num_columns)
    return None if chosen is None else _lay_out(*chosen, num_inputs=num_inputs, num_shared=num_shared, width=width)


def _lay_out(
    units: Sequence[Sequence[int]], num_columns: int, *, num_inputs: Counts, num_shared: Counts, width: int
) -> Packing:
    """Return where the tokens are of rows that share a packed one; arguments as for `plan_branches`."""
    # what is left of a packed row repeats the first token of all, as texts of their own
    cells = np.zeros((len(units), num_columns), dtype=np.int64)  # [P, W]
    branches = np.zeros_like(cells)
    places = np.zeros((len(num_inputs), width + 1), dtype=np.int64)
    for packed, unit in enumerate(units):
        shared = column = int(num_shared[unit[0]])
        cells[packed, :shared] = unit[0] * (width + 1) + np.arange(shared)
        for branch, row in enumerate(unit, start=1):
            length = int(num_inputs[row])
            end = column + length - shared
            cells[packed, column:end] = row * (width + 1) + np.arange(shared, length)
            branches[packed, column:end] = branch
            places[row, :shared] = packed * num_columns + np.arange(shared)
            places[row, shared:length] = packed * num_columns + np.arange(column, end)
            column = end
    found = {"cells": cells, "places": places, "branches": branches}
    return cast(Packing, {name: torch.from_numpy(value) for name, value in found.items()})


def _round_up(length: int) -> int:
    return -(-length // PAD_TO) * PAD_TO


def pack_tokens(tokens: Tensor, packing: Packing, *, fill: int = 0) -> Tensor:
    """Return rows [R, T] or [R, T + 1] as packed rows, [P, W]; `fill` is the token that rows of T lack."""
    missing = packing["places"].shape[1] - tokens.shape[1]
    return F.pad(tokens, (0, missing), value=fill).flatten()[packing["cells"]]


def find_positions(packing: Packing) -> Tensor:
    """Return the position of each packed token in its text, [P, W]."""
    return packing["cells"] % packing["places"].shape[1]


def unpack(values: Tensor, packing: Packing) -> Tensor:
    """Return values [P, W, …] by rows of tokens as they were, [R, T + 1, …]; of padding those of another token."""
    return values.flatten(0, 1)[packing["places"]]
