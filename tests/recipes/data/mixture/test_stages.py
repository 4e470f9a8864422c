"""The source of each position: exact shares, spread evenly, continuous where shares change."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from recipes.data.mixture.stages import PERIOD, Stages, count_shares


def located(stages: Stages, start: int, stop: int) -> list[tuple[int, int]]:
    sources, had = stages.locate(np.arange(start, stop))
    return list(zip(sources.tolist(), had.tolist(), strict=True))


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1.0], [10_000]),
        ([0.75, 0.25], [7500, 2500]),
        ([1 / 3, 1 / 3, 1 / 3], [3334, 3333, 3333]),
        ([0.99984, 0.00016], [9998, 2]),
        ([0.0, 1.0], [0, 10_000]),
    ],
)
def test_shares_add_up_to_a_period(weights: list[float], counts: list[int]) -> None:
    assert count_shares(weights).tolist() == counts


def test_every_period_has_exactly_the_shares_and_any_part_of_it_about_them() -> None:
    weights = [0.6, 0.25, 0.1, 0.05]
    sources, _ = Stages([0], [weights]).locate(np.arange(3 * PERIOD))
    for period in sources.reshape(3, PERIOD):
        assert np.bincount(period).tolist() == [6000, 2500, 1000, 500]
    seen = np.cumsum(sources[:, None] == np.arange(4), axis=0)  # [3 P, K]
    expected = np.arange(1, 3 * PERIOD + 1)[:, None] * np.array(weights)
    assert np.abs(seen - expected).max() <= 1.5, "never more than one and a half samples from the exact share"


def test_of_four_samples_a_quarter_is_one() -> None:
    sources, _ = Stages([0], [[0.75, 0.25]]).locate(np.arange(64))
    assert np.bincount(sources.reshape(16, 4)[:, :].sum(axis=1)).tolist() == [0, 16]


def test_each_source_counts_its_own_samples_through_all_stages() -> None:
    stages = Stages([0, 7, 10_020], [[0.5, 0.5], [0.1, 0.9], [1.0, 0.0]])
    places = located(stages, 0, 30_000)
    for source in (0, 1):
        own = [had for k, had in places if k == source]
        assert own == list(range(len(own)))
    assert Counter(k for k, _ in places[:7]) == {0: 4, 1: 3}
    assert Counter(k for k, _ in places[7:10_007]) == {0: 1000, 1: 9000}
    assert Counter(k for k, _ in places[10_020:]) == {0: 19_980}


@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 10_006, 10_007, 10_020, 29_999, 123_456_789_012])
def test_what_came_before_a_position_needs_no_walk_through_it(position: int) -> None:
    stages = Stages([0, 7, 10_020], [[0.5, 0.5], [0.1, 0.9], [0.75, 0.25]])
    counts = stages.count_before(position)
    assert counts.sum() == position
    [(source, had)] = located(stages, position, position + 1)
    assert had == counts[source]
    if position < 30_000:
        assert counts.tolist() == [sum(k == source for k, _ in located(stages, 0, position)) for source in (0, 1)]


@pytest.mark.parametrize(
    ("starts", "weights", "limits"),
    [
        ([0], [[0.75, 0.25]], [10, 10]),
        ([0], [[0.75, 0.25]], [1000, 3]),
        ([0, 100], [[0.5, 0.5], [0.1, 0.9]], [400, 300]),
        ([0, 100], [[0.5, 0.5], [1.0, 0.0]], [40, 50_000]),
        ([0, 100], [[0.5, 0.5], [1.0, 0.0]], [123_456, 7]),
    ],
)
def test_a_source_runs_out_where_a_walk_finds_it(starts: list[int], weights: Any, limits: list[int]) -> None:
    stages = Stages(starts, weights)
    had = [0, 0]
    for source, _ in located(stages, 0, 130_000):
        if had[source] == limits[source]:
            break
        had[source] += 1
    assert stages.find_end(np.array(limits)) == sum(had)


def test_a_source_that_is_no_longer_read_never_runs_out() -> None:
    assert Stages([0, 100], [[0.5, 0.5], [0.0, 1.0]]).find_end(np.array([50, 2**40])) > 2**40
    assert Stages([0], [[0.0, 1.0]]).find_end(np.array([0, 10])) == 10
