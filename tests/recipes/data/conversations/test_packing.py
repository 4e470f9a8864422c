"""Best-fit decreasing by numbers: every example once, no row too long, and few rows."""

from itertools import pairwise

import numpy as np
import pytest

from recipes.data.conversations.rows import one_each, pack


def rows_of(lengths: list[int], row_length: int) -> list[list[int]]:
    """Return the lengths in each row."""
    order, starts = pack(np.array(lengths), row_length=row_length)
    assert sorted(order.tolist()) == list(range(len(lengths))), "every example once"
    return [[lengths[i] for i in order[a:b]] for a, b in pairwise(starts)]


def test_each_example_goes_into_the_fullest_row_that_has_room() -> None:
    # 7 and 6 begin rows; 4 fits only beside 6; 3 fits beside 7 (room 3) and nowhere better; 2 begins a row
    assert rows_of([2, 3, 4, 6, 7], 10) == [[3, 7], [4, 6], [2]]


@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_too_long_and_at_most_one_is_half_empty(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 101, size=2000).tolist()
    sums = [sum(row) for row in rows_of(lengths, 100)]
    assert max(sums) <= 100
    assert sum(filled <= 50 for filled in sums) <= 1, "two such rows would be one"
    # at most 11/9 of the best possible number and 6/9 more (Dosa 2007), which is at least the sum of all lengths
    assert len(sums) <= 11 / 9 * np.ceil(sum(lengths) / 100) + 6 / 9 + 0.25 * len(sums)


def test_short_examples_fill_rows_to_the_last_token() -> None:
    assert {sum(row) for row in rows_of([3, 5, 7] * 1000, 10)} == {10}


def test_equal_lengths_keep_their_order() -> None:
    order, starts = pack(np.array([5, 5, 5, 5]), row_length=10)
    assert order.tolist() == [0, 1, 2, 3]
    assert starts.tolist() == [0, 2, 4]


def test_nothing_packs_into_nothing() -> None:
    order, starts = pack(np.array([], dtype=np.int64), row_length=10)
    assert (order.tolist(), starts.tolist()) == ([], [0])


def test_unpacked_rows_hold_one_example_each() -> None:
    order, starts = one_each(3)
    assert (order.tolist(), starts.tolist()) == ([0, 1, 2], [0, 1, 2, 3])
