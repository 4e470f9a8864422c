"""A hang is logged once with the stack that shows it, and its end with its duration."""

import logging
from typing import Any

import pytest
from lightning.pytorch import Callback

from callbacks import HangMonitor


class Stalls(Callback):
    """Lets the clock advance by `seconds` in one batch, as a data loader that blocks would."""

    def __init__(self, monitor: HangMonitor, clock: Any, *, seconds: float) -> None:
        self.monitor, self.clock, self.seconds = monitor, clock, seconds

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step == 4:
            self.block()

    def block(self) -> None:
        for _ in range(2):  # as its thread does, several times per timeout
            self.clock.now += self.seconds / 2
            self.monitor.check()


@pytest.mark.parametrize(("seconds", "num_hangs"), [(130.0, 1), (100.0, 0)])
def test_a_batch_that_takes_longer_than_the_timeout_is_logged_once(
    plain_module: Any, make_trainer: Any, clock: Any, caplog: Any, seconds: float, num_hangs: int
) -> None:
    monitor = HangMonitor(timeout_seconds=120)
    monitor.clock = clock
    with caplog.at_level(logging.WARNING, logger="lightning_recipes"):
        make_trainer(callbacks=[monitor, Stalls(monitor, clock, seconds=seconds)]).fit(plain_module())
    assert monitor.summary() == {"hangs": num_hangs}
    assert monitor._ended is None
    if num_hangs:
        hang, end = caplog.messages
        assert hang.startswith("Step 4, rank 0: no batch has begun or ended for 130 s; the main thread is in\n")
        assert "in block\n" in hang
        assert end == "Step 5: the run goes on after 130 s without a batch"


def test_its_thread_checks_the_time_by_itself(plain_module: Any, make_trainer: Any, caplog: Any) -> None:
    class Waits(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            while trainer.global_step == 4 and not monitor.summary()["hangs"]:
                pass

    monitor = HangMonitor(timeout_seconds=0.05)
    make_trainer(callbacks=[monitor, Waits()]).fit(plain_module())
    assert any("the main thread is in\n" in line for line in caplog.messages)


def test_no_timeout_is_an_error() -> None:
    with pytest.raises(ValueError, match="timeout_seconds is 0"):
        HangMonitor(timeout_seconds=0)
