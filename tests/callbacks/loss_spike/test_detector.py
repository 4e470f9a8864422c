"""Spikes, drifts and false alarms on synthetic series with known faults. Real curves are in benchmarks/."""

import math
import random
from collections.abc import Callable

import pytest
import torch

from callbacks.loss_spike.detector import Alarm, SpikeDetector

STEPS = 6000
ONSET = 3000
NOISE = 0.05


def curve(seed: int, *, heavy_fraction: float = 0.0, num_steps: int = STEPS) -> list[float]:
    """Return a loss that falls from 7.7 to 2.2; a fraction of its noise is four times as wide."""
    rng = random.Random(seed)
    values = []
    for step in range(num_steps):
        width = 4 * NOISE if rng.random() < heavy_fraction else NOISE
        values.append(2.2 + 5.5 * math.exp(-step / 250) + width * rng.gauss(0, 1))
    return values


def alarms(values: list[float], detector: SpikeDetector | None = None) -> dict[int, Alarm]:
    detector = detector or SpikeDetector()
    found = {step: detector.observe(value) for step, value in enumerate(values)}
    return {step: alarm for step, alarm in found.items() if alarm is not None}


def faulty(seed: int, fault: Callable[[int], float]) -> list[float]:
    """Return a curve to which a fault is added from `ONSET` on, as a function of the steps since."""
    return [value + (fault(step - ONSET) if step >= ONSET else 0.0) for step, value in enumerate(curve(seed))]


@pytest.mark.parametrize("seed", range(10))
def test_a_clean_curve_raises_no_alarm(seed: int) -> None:
    assert alarms(curve(seed)) == {}


def test_at_most_a_thousandth_of_values_with_wide_tails_are_alarms() -> None:
    """Two per cent of the noise is four times as wide: 8 standard deviations are 2 of its own, rarely reached."""
    found = [alarms(curve(seed, heavy_fraction=0.02)) for seed in range(10)]
    assert sum(len(by_step) for by_step in found) <= 0.001 * 10 * STEPS
    assert {alarm.kind for by_step in found for alarm in by_step.values()} <= {"spike"}


def test_a_rise_that_lasts_is_a_level_even_within_the_range_of_the_run_and_one_that_passes_is_none() -> None:
    def levels(fault: Callable[[int], float]) -> list[int]:
        detector = SpikeDetector(drift_threshold=None, min_rise=3.0, finds_levels=True)
        return [step - ONSET for step, alarm in alarms(faulty(0, fault), detector).items() if alarm.kind == "drift"]

    # the curve begins at 7.7: no value is an outlier in the run as a whole
    assert 7 <= levels(lambda since: 0.7)[0] <= 11
    assert levels(lambda since: 0.7 if since < 7 else 0.0) == []
    assert levels(lambda since: 5.0 if since % 10 == 0 else 0.0) == []
    assert levels(lambda since: 0.0) == []


@pytest.mark.parametrize(
    ("fault", "most_steps_late"),
    [
        (lambda since: 0.7 if since == 0 else 0.0, 0),
        (lambda since: 1.0 if since < 20 else 0.0, 0),
        (lambda since: 7.5, 0),
        (lambda since: 2.0 * min(since, 400) / 400, 250),
    ],
    ids=["one step", "twenty steps", "permanent", "slow divergence"],
)
def test_a_fault_is_found_in_time(fault: Callable[[int], float], most_steps_late: int) -> None:
    for seed in range(10):
        found = alarms(faulty(seed, fault))
        assert ONSET <= min(found) <= ONSET + most_steps_late


def test_an_outlier_neither_raises_the_threshold_for_the_next_nor_hides_it() -> None:
    values = faulty(0, lambda since: 4.0 if since == 0 else 0.6 if since < 21 else 0.0)
    found = alarms(values)
    assert list(found) == list(range(ONSET, ONSET + 21))
    assert found[ONSET].expected == pytest.approx(found[ONSET + 20].expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_raise_an_alarm_at_once_and_do_not_enter_the_window(value: float) -> None:
    detector = SpikeDetector()
    first = detector.observe(value)
    assert first is not None
    assert (first.kind, first.score) == ("non_finite", math.inf)
    assert detector.window == []
    for step in range(200):
        assert detector.observe(2.0 + 0.01 * (step % 7)) is None
    before = detector.window
    assert detector.observe(value) is not None
    assert detector.window == before


def test_there_is_no_spike_during_the_warm_up() -> None:
    detector = SpikeDetector(window=16, warmup_steps=8)
    assert [detector.observe(value) for value in [2.0] * 7 + [50.0]] == [None] * 8
    alarm = detector.observe(50.0)
    assert alarm is not None
    assert alarm.expected == 2.0


def test_equal_values_have_a_spread_of_a_thousandth() -> None:
    detector = SpikeDetector(window=16, warmup_steps=8)
    for _ in range(16):
        assert detector.observe(2.0) is None
    assert detector.score(2.001) == pytest.approx(0.5)
    assert detector.observe(2.02) is not None


def test_norms_are_compared_by_their_ratio() -> None:
    rng = random.Random(0)
    norms = [math.exp(rng.gauss(0, 0.3)) for _ in range(1000)]
    detector = SpikeDetector(logarithmic=True)
    assert alarms(norms, detector) == {}
    assert detector.observe(0.0) is None  # less is never a spike
    alarm = detector.observe(100.0)
    assert alarm is not None
    assert alarm.expected == pytest.approx(1.0, rel=0.2)


def test_slowly_rising_norms_are_a_drift_unless_drift_detection_is_off() -> None:
    rng = random.Random(0)
    norms = [math.exp(step / 4000 + rng.gauss(0, 0.1)) for step in range(4000)]
    assert {alarm.kind for alarm in alarms(norms, SpikeDetector(logarithmic=True)).values()} == {"drift"}
    assert alarms(norms, SpikeDetector(logarithmic=True, drift_threshold=None)) == {}


def test_the_state_survives_a_round_trip() -> None:
    values = faulty(1, lambda since: 2.0 * min(since, 400) / 400)
    uninterrupted = alarms(values)
    half = ONSET + 150  # while the slow rule counts
    first, second = SpikeDetector(), SpikeDetector()
    before = alarms(values[:half], first)
    second.load_state_dict(first.state_dict())
    after = alarms(values[half:], second)
    assert before | {half + step: alarm for step, alarm in after.items()} == uninterrupted


def test_a_detector_that_forgets_learns_the_new_level() -> None:
    detector = SpikeDetector(window=32, warmup_steps=16)
    for step in range(64):
        detector.observe(2.0 + 0.01 * (step % 5))
    assert detector.observe(3.0) is not None
    detector.forget()
    assert all(detector.observe(3.0 + 0.01 * (step % 5)) is None for step in range(64))


def near_zero(seed: int) -> list[float]:
    """Return the loss of a classifier that has learned its data: small, and hundreds of times larger where it errs."""
    rng = random.Random(seed)
    return [2.3 * math.exp(-step / 50) + 0.01 * math.exp(rng.gauss(0, 1.5)) for step in range(2000)]


@pytest.mark.parametrize("seed", range(3))
def test_near_zero_many_steps_are_outliers_by_spread_and_none_by_what_the_run_has_shown(seed: int) -> None:
    assert len(alarms(near_zero(seed))) > 0.05 * 2000
    assert alarms(near_zero(seed), SpikeDetector(min_rise=3.0, drift_threshold=None)) == {}


def test_a_lasting_rise_below_the_first_losses_is_no_outlier_of_the_run() -> None:
    """As when an augmentation is switched on; above them by the same distance again and again it is one."""
    higher = faulty(0, lambda since: 2.0)
    assert len(alarms(higher)) > 100
    assert alarms(higher, SpikeDetector(min_rise=3.0, drift_threshold=None)) == {}
    far_higher = faulty(0, lambda since: 20.0 if since == 0 else 0.0)
    assert list(alarms(far_higher, SpikeDetector(min_rise=3.0))) == [ONSET]


def test_the_largest_normal_value_survives_a_round_trip() -> None:
    first, second = (SpikeDetector(min_rise=3.0) for _ in range(2))
    alarms(curve(0, num_steps=1000), first)
    second.load_state_dict(first.state_dict())
    assert second.limit() == first.limit() > 7.7
    first.forget()
    assert first.state_dict()["peak"] is None


def test_a_warm_up_longer_than_the_window_is_an_error() -> None:
    with pytest.raises(ValueError, match="a warm-up of 64 values needs a window"):
        SpikeDetector(window=32)


def test_losses_of_exactly_zero_are_normal_also_where_denormal_numbers_are_flushed() -> None:
    flushed = torch.set_flush_denormal(True)
    try:
        assert alarms([0.0] * 300, SpikeDetector(min_rise=0.0)) == {}
        assert alarms([1.0] * 100 + [0.0] * 300, SpikeDetector(logarithmic=True)) == {}
    finally:
        torch.set_flush_denormal(False)
    assert flushed, "this processor cannot"
