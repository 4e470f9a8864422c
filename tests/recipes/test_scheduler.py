"""Schedules are pure functions of the step: their values at the steps that matter."""

from collections.abc import Callable
from functools import partial

import pytest

from recipes import scheduler

SCHEDULES: dict[str, Callable[[int], float]] = {
    "warmup_cosine": partial(scheduler.warmup_cosine, num_steps=100, warmup_steps=10, min_lr_factor=0.1),
    "wsd": partial(
        scheduler.wsd,
        num_steps=100,
        warmup_steps=10,
        decay_steps=20,
        min_lr_factor=0.0,
    ),
    "linear": partial(scheduler.linear, num_steps=100, warmup_steps=10, min_lr_factor=0.0),
    "constant": partial(scheduler.constant, warmup_steps=10),
    "constant_cooldown": partial(
        scheduler.constant_cooldown,
        num_steps=100,
        warmup_steps=0,
        cooldown_steps=25,
        min_lr_factor=0.0,
    ),
    "step": partial(scheduler.step, milestones=[50, 80], gamma=0.1, warmup_steps=0),
    "one_cycle": partial(
        scheduler.one_cycle,
        num_steps=100,
        pct_start=0.3,
        start_fraction=0.04,
        min_lr_factor=1e-4,
    ),
}
VALUES: dict[str, dict[int, float]] = {
    "warmup_cosine": {0: 0.1, 9: 1.0, 54: 0.55, 99: 0.1, 150: 0.1},
    "wsd": {0: 0.1, 9: 1.0, 79: 1.0, 80: 0.95, 89: 0.5, 99: 0.0},
    "linear": {0: 0.1, 9: 1.0, 54: 0.5, 99: 0.0, 200: 0.0},
    "constant": {0: 0.1, 4: 0.5, 9: 1.0, 10_000: 1.0},
    "constant_cooldown": {0: 1.0, 74: 1.0, 75: 0.8, 83: 0.4, 99: 0.0},
    "step": {0: 1.0, 49: 1.0, 50: 0.1, 79: 0.1, 80: 0.01},
    "one_cycle": {14: 0.52, 29: 1.0, 64: 0.50005, 99: 1e-4},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_its_values_at_the_steps_that_matter(name: str) -> None:
    for step, expected in VALUES[name].items():
        assert SCHEDULES[name](step) == pytest.approx(expected, abs=1e-12), step


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_multiplier_is_always_between_zero_and_one(name: str) -> None:
    assert all(0.0 <= SCHEDULES[name](step) <= 1.0 for step in range(300))


@pytest.mark.parametrize("name", ["warmup_cosine", "linear"])
def test_a_run_that_ends_within_its_warmup_only_warms_up(name: str) -> None:
    short = partial(SCHEDULES[name], num_steps=3)
    assert [short(step) for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])
