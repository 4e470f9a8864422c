"""Each micro-batch carries the number of targets of its global batch, before the first backward pass."""

from collections.abc import Iterator

import torch
from torch import Tensor

from recipes.data.batches import Batch, with_counts
from recipes.loss.cross_entropy import CrossEntropy

COUNT = CrossEntropy().counts


def batches(counts: list[int]) -> Iterator[Batch]:
    """Yield one micro-batch of 10 targets for each number of targets that carry loss."""
    for count in counts:
        targets = torch.full((2, 5), -100)  # [B, T]
        targets.view(-1)[:count] = 1
        yield {"targets": targets}


def doubled(value: Tensor) -> Tensor:
    """Return the sum over two ranks with the same counts."""
    return value * 2


def test_counts_are_summed_over_the_window_and_the_ranks() -> None:
    stream = with_counts(
        batches([1, 2, 3, 4]),
        num_micro_batches=2,
        count=CrossEntropy().counts,
        counts_of_window=None,
        sum_over_ranks=doubled,
    )
    assert [int(batch["num_targets"]) for batch in stream] == [6, 6, 14, 14]


def test_a_partial_window_at_the_end_is_dropped() -> None:
    stream = with_counts(
        batches([1, 2, 3]),
        num_micro_batches=2,
        count=CrossEntropy().counts,
        counts_of_window=None,
        sum_over_ranks=doubled,
    )
    assert len(list(stream)) == 2


def test_a_window_without_targets_counts_as_one_so_that_its_gradient_is_zero() -> None:
    stream = with_counts(
        batches([0, 0]), num_micro_batches=2, count=COUNT, counts_of_window=None, sum_over_ranks=doubled
    )
    assert [int(batch["num_targets"]) for batch in stream] == [1, 1]


def test_a_constant_number_is_not_counted_and_nothing_is_read_ahead() -> None:
    read = 0

    def counted() -> Iterator[Batch]:
        nonlocal read
        for batch in batches([10] * 4):
            read += 1
            yield batch

    stream = with_counts(
        counted(),
        num_micro_batches=4,
        count=CrossEntropy().counts,
        counts_of_window={"num_targets": 40},
        sum_over_ranks=doubled,
    )
    assert next(stream)["num_targets"] == 40
    assert read == 1
