"""BottleneckMonitor reports a cause once, and only when five rows in a row agree."""

from dataclasses import replace

import pytest
from timed import STEP, monitor_at, timed

from callbacks.bottleneck.callback import (
    NUM_SAMPLES,
    BottleneckMonitor,
    BottleneckSample,
    find_bottlenecks,
    median_sample,
)

FINE = BottleneckSample(step=100, seconds=4.0, step_seconds=0.4, data_wait_fraction=(0.02, 0.03))
HALF = replace(FINE, data_wait_fraction=(0.02, 0.5))


def kinds(rows: list[BottleneckSample], best: BottleneckSample | None = None) -> list[str]:
    return [bottleneck.kind for bottleneck in find_bottlenecks(rows, best=best)]


def test_a_healthy_run_has_no_finding() -> None:
    assert kinds([FINE] * NUM_SAMPLES, best=FINE) == []


def test_five_rows_must_agree_and_be_ten_seconds_long() -> None:
    assert kinds([HALF] * NUM_SAMPLES) == ["data"]
    assert kinds([HALF] * (NUM_SAMPLES - 1)) == []
    assert kinds([HALF, HALF, FINE, HALF, HALF]) == []
    assert kinds([FINE, *[HALF] * NUM_SAMPLES]) == ["data"]
    assert kinds([replace(HALF, seconds=1.9)] * NUM_SAMPLES) == []


@pytest.mark.parametrize(("wait", "found"), [(0.10, []), (0.11, ["data"])])
def test_waiting_for_data_is_reported_above_a_tenth_of_a_step(wait: float, found: list[str]) -> None:
    assert kinds([replace(FINE, data_wait_fraction=(0.0, wait))] * NUM_SAMPLES) == found


def test_a_slow_rank_is_named_if_it_is_the_same_in_every_row() -> None:
    slow = replace(FINE, forward_seconds=(0.1, 0.1, 0.15, 0.1))
    other = replace(FINE, forward_seconds=(0.1, 0.15, 0.1, 0.1))
    [bottleneck] = find_bottlenecks([slow] * NUM_SAMPLES, best=None)
    assert bottleneck.message.startswith("rank 2's forward pass takes 1.5 times as long")
    assert kinds([slow, slow, other, slow, slow]) == []
    assert kinds([replace(FINE, forward_seconds=(0.1, 0.12))] * NUM_SAMPLES) == []


def test_gradient_sync_is_reported_above_a_quarter_of_a_step() -> None:
    assert kinds([replace(FINE, sync_seconds=0.11)] * NUM_SAMPLES) == ["sync"]
    assert kinds([replace(FINE, sync_seconds=0.09)] * NUM_SAMPLES) == []


def test_free_memory_is_reported_if_there_are_several_micro_batches() -> None:
    roomy = replace(FINE, free_memory_fraction=0.7, num_micro_batches=8)
    assert kinds([roomy] * NUM_SAMPLES) == ["small_batch"]
    assert kinds([replace(roomy, num_micro_batches=1)] * NUM_SAMPLES) == []
    assert kinds([replace(roomy, free_memory_fraction=0.5)] * NUM_SAMPLES) == []


def test_steps_1_5_times_the_best_are_reported_with_the_mfu() -> None:
    best = replace(FINE, mfu=0.42)
    now = replace(FINE, step=900, step_seconds=0.8, mfu=0.21)
    [bottleneck] = find_bottlenecks([now] * NUM_SAMPLES, best=best)
    assert bottleneck.kind == "slower"
    assert "steps take 0.8 s; around step 100 they took 0.4 s" in bottleneck.message
    assert "MFU 0.210, was 0.420" in bottleneck.message
    assert kinds([replace(now, step_seconds=0.55)] * NUM_SAMPLES, best=best) == []


def test_the_typical_row_is_the_median_not_an_outlier() -> None:
    rows = [replace(FINE, step_seconds=s) for s in (0.1, 9.0, 0.3, 0.2, 0.25)]
    assert median_sample(rows).step_seconds == 0.25
    assert median_sample(rows[:-1]) is None


def test_a_run_that_waits_for_data_logs_it_once_with_advice(
    plain_module, make_trainer, clock, caplog, monkeypatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 5})
    monitor = BottleneckMonitor(advice={"data": "loader.num_workers={cores}"})
    monitor.clock = clock
    callbacks = [monitor_at(clock), monitor]
    trainer = make_trainer(callbacks=callbacks, max_epochs=4, log_every_n_steps=2)
    # a fetch of 0.25 s before each step of 0.75 s
    trainer.fit(timed(plain_module, clock))
    lines = [r.getMessage() for r in caplog.records if "waiting for data" in r.getMessage()]
    assert lines == ["Step 10: 25% of each step is spent waiting for data; loader.num_workers=3"]


def test_without_a_speed_monitor_nothing_is_logged(plain_module, make_trainer, clock, caplog) -> None:
    make_trainer(callbacks=[BottleneckMonitor()], max_epochs=4).fit(timed(plain_module, clock))
    assert "data" not in caplog.text


def test_the_best_speed_survives_a_resume_on_the_same_device(plain_module, make_trainer, clock, caplog) -> None:
    first, second, third = BottleneckMonitor(), BottleneckMonitor(), BottleneckMonitor()
    options = {"max_epochs": 3, "log_every_n_steps": 2}
    make_trainer(callbacks=[monitor_at(clock), first], **options).fit(timed(plain_module, clock))
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()

    class Slower(type(timed(plain_module, clock))):  # type: ignore[misc]
        def training_step(self, *arguments):
            clock.now += 3 * STEP
            return super().training_step(*arguments)

    def fit(monitor: BottleneckMonitor) -> str:
        caplog.clear()
        trainer = make_trainer(callbacks=[monitor_at(clock), monitor], **options)
        trainer.fit(Slower())
        return caplog.text

    assert "they took 1 s" in fit(second)
    third.load_state_dict(first.state_dict() | {"where": "another device x 8"})
    assert "they took" not in fit(third)


def test_a_batch_with_two_backward_passes_has_no_phases(plain_module, make_trainer, clock) -> None:
    import torch

    class Gan(plain_module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for _ in range(2):
                self.manual_backward(self.layer(batch[0]).sum())
            self.optimizers().step()
            return torch.zeros(())

    monitor = BottleneckMonitor()
    make_trainer(callbacks=[monitor_at(clock), monitor]).fit(Gan())
    assert monitor.state_dict()["reported"] == []


def test_a_speed_monitor_that_comes_later_is_a_warning(plain_module, make_trainer, clock, caplog) -> None:
    make_trainer(callbacks=[BottleneckMonitor(), monitor_at(clock)]).fit(timed(plain_module, clock))
    assert "it has no SpeedMonitor before it" in caplog.text


def test_advice_about_an_unknown_kind_is_an_error_that_lists_the_kinds() -> None:
    with pytest.raises(ValueError, match=r"advice is about \['disk'\]; the kinds are data, slow_rank"):
        BottleneckMonitor(advice={"disk": "buy one"})
