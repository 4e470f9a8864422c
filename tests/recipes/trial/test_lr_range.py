"""Learning rates read off curves whose slope, lowest point and end are known."""

import math

import pytest

from recipes.mode.lr_find import read_range_test, rising, smooth

NUM = 101
RATES = [10 ** (-6 + 6 * i / (NUM - 1)) for i in range(NUM)]  # 1e-6 to 1


def bowl(lr: float) -> float:
    """Fall from 8 to 3 as a logistic around 1e-3, and rise as a power from 0.03 on."""
    return 8 - 5 / (1 + math.exp(-3 * (math.log10(lr) + 3))) + (lr / 0.1) ** 2


def test_the_rate_rises_by_equal_factors_to_its_end() -> None:
    values = [rising(step, num_steps=5, first_fraction=1e-4) for step in range(5)]
    assert values == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])


def test_the_steepest_fall_and_the_lowest_point_are_found() -> None:
    found = read_range_test(RATES, [bowl(lr) for lr in RATES], width=5)
    assert found.steepest == pytest.approx(1e-3, rel=0.2)
    # where the rise begins to outweigh the fall; a triangle of 11 steps spans 0.6 decades
    assert 0.01 < found.lowest < 0.05
    # 8 again where (lr / 0.1) ** 2 is nearly 5
    assert found.diverges == pytest.approx(0.22, rel=0.2)


def test_noise_of_single_steps_changes_little() -> None:
    noisy = [bowl(lr) + 0.15 * math.sin(97.0 * i) for i, lr in enumerate(RATES)]
    found = read_range_test(RATES, noisy, width=5)
    assert found.steepest == pytest.approx(1e-3, rel=0.6)


def test_a_loss_that_does_not_fall_has_no_best_rate() -> None:
    found = read_range_test(RATES, [5.0 + 1e-3 * math.sin(i) for i in range(NUM)], width=5)
    assert (found.steepest, found.lowest) == (None, None)


def test_a_loss_that_ends_in_nan_diverges_there() -> None:
    losses = [bowl(lr) for lr in RATES[:70]] + [math.nan]
    found = read_range_test(RATES, losses, width=5)
    assert found.diverges == pytest.approx(RATES[70])
    assert len(found.smoothed) == 70
    assert read_range_test(RATES, [math.nan], width=5).diverges == RATES[0]


def test_means_are_weighted_by_a_triangle_and_cut_at_the_ends() -> None:
    assert smooth([0.0, 4.0, 0.0, 0.0], width=1) == pytest.approx([4 / 3, 2.0, 1.0, 0.0])
