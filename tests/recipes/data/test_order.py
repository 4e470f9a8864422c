"""The stream is a permutation of the samples in every epoch, whichever ranks read it."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from recipes.data.batches import PositionSampler
from recipes.data.order import GroupedOrder, RepeatedOrder, ShuffledOrder


def read(order, *, start, micro_batch_size, world_size, num_samples):
    """Return the stream from `start`, joined from the samplers of all ranks."""
    samplers = [
        iter(
            PositionSampler(
                order,
                start_position=start,
                micro_batch_size=micro_batch_size,
                rank=rank,
                world_size=world_size,
            )
        )
        for rank in range(world_size)
    ]
    stream = []
    while len(stream) < num_samples:
        for sampler in samplers:
            stream += next(sampler)
    return stream[:num_samples]


def test_every_epoch_of_1_to_300_samples_is_a_permutation():
    for num_samples in range(1, 301):
        order = ShuffledOrder(num_samples, seed=7)
        stream = order.indices(np.arange(3 * num_samples))
        for epoch in stream.reshape(3, num_samples):
            assert sorted(epoch.tolist()) == list(range(num_samples)), num_samples


def test_two_epochs_and_two_seeds_differ():
    first, second = ShuffledOrder(100, seed=1).indices(np.arange(200)).reshape(2, 100)
    other = ShuffledOrder(100, seed=2).indices(np.arange(100))
    assert first.tolist() != second.tolist()
    assert first.tolist() != other.tolist()
    assert first.tolist() != list(range(100))


def test_one_position_alone_gives_what_the_whole_array_gives():
    order = ShuffledOrder(57, seed=-3)
    assert [order(position) for position in range(150)] == order.indices(np.arange(150)).tolist()
    grid = np.arange(12).reshape(3, 4)
    assert order.indices(grid).tolist() == order.indices(np.arange(12)).reshape(3, 4).tolist()


@pytest.mark.parametrize("num_samples", [2**31 + 11, 2**40 + 1, 2**62 - 57])
def test_sizes_beyond_32_bits_stay_in_range_and_do_not_collide(num_samples):
    positions = np.arange(2000, dtype=np.int64) + (num_samples - 1000)
    samples = ShuffledOrder(num_samples, seed=2**70).indices(positions)
    assert samples.min() >= 0
    assert samples.max() < num_samples
    assert len(set(samples[:1000].tolist())) == 1000
    assert samples.max() > num_samples // 2


@pytest.mark.parametrize("num_samples", [3, 10, 32])
def test_every_sample_is_equally_likely_at_every_position(num_samples):
    num_epochs = 4000
    order = ShuffledOrder(num_samples, seed=11)
    epochs = order.indices(np.arange(num_epochs * num_samples)).reshape(-1, num_samples)
    counts = np.zeros((num_samples, num_samples))
    for place in range(num_samples):
        counts[place] = np.bincount(epochs[:, place], minlength=num_samples)
    expected = num_epochs / num_samples
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (num_samples - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_neighbors_in_the_stream_are_not_neighbors_in_the_file():
    order = ShuffledOrder(10_000, seed=5)
    samples = order.indices(np.arange(10_000))
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(samples)) == 1) < 0.001  # 2 in 10 000 by chance


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
def test_ranks_and_micro_batches_share_one_stream(world_size, micro_batch_size):
    order = ShuffledOrder(37, seed=3)
    expected = order.indices(np.arange(150)).tolist()
    assert expected == read(
        order,
        start=0,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
        num_samples=150,
    )


def test_a_resume_with_other_ranks_continues_with_the_next_sample():
    order = ShuffledOrder(37, seed=3)
    whole = read(order, start=0, micro_batch_size=4, world_size=2, num_samples=200)
    tail = read(order, start=48, micro_batch_size=2, world_size=3, num_samples=152)
    assert whole[48:] == tail


def test_more_micro_batches_than_one_block_are_seamless():
    order = ShuffledOrder(1000, seed=0)
    sampler = PositionSampler(order, start_position=5, micro_batch_size=3000, rank=0, world_size=1, num_micro_batches=7)
    batches = list(sampler)
    assert len(sampler) == len(batches) == 7
    assert [sample for batch in batches for sample in batch] == order.indices(np.arange(5, 21005)).tolist()


def test_a_repeated_order_repeats_the_beginning_of_the_stream():
    whole, repeated = ShuffledOrder(57, seed=3), RepeatedOrder(ShuffledOrder(57, seed=3), period=12)
    first = whole.indices(np.arange(12)).tolist()
    assert repeated.indices(np.arange(60)).tolist() == 5 * first
    assert repeated(12 * 10**12 + 7) == first[7]


def test_a_period_longer_than_an_epoch_continues_into_the_next_one():
    first = ShuffledOrder(10, seed=3).indices(np.arange(24)).tolist()
    assert RepeatedOrder(ShuffledOrder(10, seed=3), period=24).indices(np.arange(48)).tolist() == 2 * first


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_and_micro_batches_share_one_repeated_stream(world_size):
    order = RepeatedOrder(ShuffledOrder(37, seed=3), period=12)
    stream = read(order, start=0, micro_batch_size=2, world_size=world_size, num_samples=60)
    assert stream == 5 * stream[:12]
    assert len(set(stream)) == 12


def test_an_endless_stream_has_no_length():
    sampler = PositionSampler(ShuffledOrder(4, 0), start_position=0, micro_batch_size=2, rank=0, world_size=1)
    with pytest.raises(TypeError, match="endless"):
        len(sampler)


def test_the_number_of_workers_changes_nothing():
    def batches(num_workers):
        sampler = PositionSampler(
            ShuffledOrder(20, seed=9),
            start_position=3,
            micro_batch_size=2,
            rank=1,
            world_size=2,
        )
        loader = DataLoader(list(range(20)), batch_sampler=sampler, num_workers=num_workers)
        return [batch.tolist() for batch in islice(loader, 9)]

    assert batches(0) == batches(2)


def test_no_global_random_state_is_touched():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    ShuffledOrder(50, seed=1).indices(np.arange(500))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_an_order_of_no_samples_is_rejected():
    with pytest.raises(ValueError, match="num_samples=0: an order needs samples"):
        ShuffledOrder(0, seed=1)


def test_a_grouped_order_has_each_index_several_times_and_each_block_again():
    order = GroupedOrder(ShuffledOrder(6, seed=3), group_size=2, block_size=4, num_reads=2)
    a, b, c, d, e, f = (ShuffledOrder(6, seed=3)(position) for position in range(6))
    blocks = [[a, a, b, b], [c, c, d, d], [e, e, f, f]]
    assert order.indices(np.arange(24)).tolist() == [index for block in blocks for index in block * 2]
    assert order.draws(np.arange(16)).tolist() == [*range(4), *range(4), *range(4, 8), *range(4, 8)]


def test_a_grouped_order_is_a_function_of_each_position_alone():
    order = GroupedOrder(ShuffledOrder(57, seed=3), group_size=3, block_size=8, num_reads=3)
    for position in range(500):
        block = position // 8
        place = block // 3 * 8 + position % 8
        assert order.places(np.array(position)).tolist() == [ShuffledOrder(57, seed=3)(place // 3), place]
    grid = np.arange(500).reshape(5, 100)
    assert order.indices(grid).reshape(-1).tolist() == [order(position) for position in range(500)]
