"""Pack examples into rows with best-fit decreasing, 1 us per example.

Each example, longest first, goes into the fullest row that has room for it. Letters: N examples, R rows, L tokens per
row.
"""

import numpy as np
from numpy.typing import NDArray

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
