"""A stopwatch that pauses: every interval is counted once or excluded once."""

from callbacks.throughput.stopwatch import Stopwatch


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_save_and_a_validation_after_one_step_are_each_excluded_once() -> None:
    clock = FakeClock()
    watch = Stopwatch(clock)
    watch.start()
    clock.now = 10.0  # the step ends here, which both pauses are given
    clock.now = 10.5
    watch.pause("save", at=10.0)
    clock.now = 13.0
    watch.resume("save")
    clock.now = 13.25
    watch.pause("validation", at=10.0)
    clock.now = 20.0
    watch.resume("validation")
    clock.now = 21.0
    assert watch.seconds() == 11.0


def test_overlapping_reasons_are_excluded_once() -> None:
    clock = FakeClock()
    watch = Stopwatch(clock)
    watch.start()
    for moment, action, reason in [
        (1.0, watch.pause, "a"),
        (2.0, watch.pause, "b"),
        (3.0, watch.resume, "a"),
        (5.0, watch.resume, "b"),
    ]:
        clock.now = moment
        action(reason)
    clock.now = 6.0
    assert watch.seconds() == 2.0


def test_each_stretch_is_booked_on_the_reason_that_came_last() -> None:
    clock = FakeClock()
    watch = Stopwatch(clock)
    watch.start()
    for moment, action, reason in [
        (1.0, watch.pause, "first_step"),
        (2.0, watch.pause, "compile"),
        (6.0, watch.resume, "compile"),
        (9.0, watch.resume, "first_step"),
        (10.0, watch.pause, "validation"),
        (13.0, watch.pause, "end"),
    ]:
        clock.now = moment
        action(reason)
    clock.now = 20.0
    assert watch.excluded_seconds == {"first_step": 4.0, "compile": 4.0, "validation": 3.0}
    assert watch.seconds() == 2.0
