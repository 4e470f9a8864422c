"""SpeedMonitor on a clock that only data, steps, validations and saves move."""

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from timed import FETCH, STEP, VALIDATION, monitor_at, timed
from torch import Tensor

from callbacks.throughput.callback import SpeedMonitor

SAVE = 128.0


class SlowCheckpoint(ModelCheckpoint):
    """Saving takes SAVE seconds, whatever triggers it."""

    def __init__(self, clock: Any, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.clock = clock

    def on_save_checkpoint(self, *args: Any) -> None:
        self.clock.now += SAVE


def test_a_row_is_the_window_since_the_last_row(plain_module, make_trainer, read_column, clock) -> None:
    module = timed(plain_module, clock, first_step=4.75)
    make_trainer(callbacks=[monitor_at(clock)], log_every_n_steps=4).fit(module)
    assert read_column("time/step_seconds") == [1.0, 1.0]  # of steps 2 to 4, and 5 to 8
    assert read_column("time/excluded_seconds") == [5.0, 0.0]  # the first step of the process
    assert read_column("time/data_wait_fraction") == [0.25, 0.25]
    assert read_column("throughput/samples_per_second") == [2.0, 2.0]
    assert read_column("throughput/tokens_per_second") == [16.0, 16.0]
    assert read_column("throughput/device_tokens_per_second") == [16.0, 16.0]


def test_four_micro_batches_are_one_step(plain_module, make_trainer, read_column, clock) -> None:
    make_trainer(callbacks=[monitor_at(clock)], accumulate_grad_batches=4).fit(timed(plain_module, clock))
    assert read_column("time/step_seconds") == [4.0]
    assert read_column("throughput/tokens_per_second") == [16.0]


@pytest.mark.parametrize("log_every", [1, 8])
def test_evaluation_is_excluded(plain_module, make_trainer, read_column, clock, log_every) -> None:
    trainer = make_trainer(
        callbacks=[monitor_at(clock)],
        log_every_n_steps=log_every,
        limit_val_batches=2,
        val_check_interval=3,
    )
    trainer.fit(timed(plain_module, clock))
    assert clock.now == 100.0 + 8 * (STEP + FETCH) + 2 * 2 * VALIDATION
    assert read_column("time/step_seconds") == [1.0] * (7 if log_every == 1 else 1)
    assert sum(read_column("time/excluded_seconds")) == 1.0 + 2 * 2 * VALIDATION


def test_the_row_after_a_validation_has_its_throughput(plain_module, make_trainer, read_column, clock) -> None:
    monitor = SpeedMonitor(batch_size_fn=lambda batch: len(batch[0]) if isinstance(batch, list) else len(batch))
    monitor.clock = clock
    trainer = make_trainer(
        callbacks=[monitor], log_every_n_steps=2, limit_val_batches=2, val_check_interval=3, num_sanity_val_steps=1
    )
    trainer.fit(timed(plain_module, clock))
    # after steps 3 and 6, in the rows of steps 4 and 8: 2 batches of 2 samples, 64 s each
    assert read_column("throughput/validation_samples_per_second") == [4 / 128, 4 / 128]


@pytest.mark.parametrize("save_after_validation", [False, True])
def test_saving_is_excluded(plain_module, make_trainer, read_column, clock, tmp_path, save_after_validation) -> None:
    when: dict[str, Any] = {"every_n_train_steps": 3}
    if save_after_validation:
        when = {"save_on_train_epoch_end": False}
    saver = SlowCheckpoint(clock, dirpath=tmp_path / "checkpoints", save_top_k=-1, **when)
    trainer = make_trainer(
        callbacks=[monitor_at(clock), saver],
        enable_checkpointing=True,
        limit_val_batches=2,
        val_check_interval=3,
    )
    trainer.fit(timed(plain_module, clock))
    assert clock.now >= 100.0 + 2 * SAVE
    assert read_column("time/step_seconds") == [1.0] * 7


def test_time_under_the_name_sample_text_is_excluded(plain_module, make_trainer, read_column, clock) -> None:
    class Sampler(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            with trainer.profiler.profile("sample_text"):
                clock.now += 32.0

    make_trainer(callbacks=[monitor_at(clock), Sampler()]).fit(timed(plain_module, clock))
    assert read_column("time/step_seconds") == [1.0] * 7


def test_time_of_other_callbacks_is_not_excluded(plain_module, make_trainer, read_column, clock) -> None:
    class SlowCallback(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            clock.now += 2.0

    make_trainer(callbacks=[monitor_at(clock), SlowCallback()]).fit(timed(plain_module, clock))
    assert read_column("time/step_seconds") == [3.0] * 7


def test_the_summary_excludes_the_first_step(plain_module, make_trainer, clock) -> None:
    monitor = monitor_at(clock)
    trainer = make_trainer(callbacks=[monitor], log_every_n_steps=50, limit_val_batches=2)
    trainer.fit(timed(plain_module, clock, first_step=1000.0))
    assert monitor.summary() == {
        "steps": 7,
        "seconds": 7.0,
        "tokens_per_second": 16.0,
        "samples_per_second": 2.0,
        "step_seconds": 1.0,
        "mfu": None,
        "excluded_seconds": {"first_step": 1000.0 + FETCH, "validation": 2 * VALIDATION},
    }


def test_a_module_that_counts_nothing_gets_seconds_only(
    plain_module, make_trainer, tmp_path, read_column, clock
) -> None:
    monitor = monitor_at(clock)
    make_trainer(callbacks=[monitor]).fit(timed(plain_module, clock, counts=False))
    assert read_column("time/step_seconds") == [1.0] * 7
    assert "per_second" not in (tmp_path / "run" / "metrics.csv").read_text()
    assert monitor.summary()["tokens_per_second"] is None


def test_a_resumed_run_averages_over_both_parts(plain_module, make_trainer, clock, tmp_path) -> None:
    first = monitor_at(clock)
    trainer = make_trainer(callbacks=[first], max_steps=4)
    trainer.fit(timed(plain_module, clock))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    second = monitor_at(clock)
    trainer = make_trainer(callbacks=[second], max_epochs=2)
    trainer.fit(timed(plain_module, clock), ckpt_path=tmp_path / "half.ckpt")
    assert first.summary()["steps"] == 3
    num_resumed = trainer.global_step - 4
    assert second.summary()["steps"] == 3 + num_resumed - 1
    assert second.summary()["step_seconds"] == 1.0
    assert second.summary()["excluded_seconds"] == {"first_step": 2.0}


def test_the_state_survives_a_round_trip(plain_module, make_trainer, clock) -> None:
    first, second = monitor_at(clock), SpeedMonitor()
    make_trainer(callbacks=[first]).fit(timed(plain_module, clock))
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.summary() == first.summary()


def test_the_profiler_gets_its_own_methods_back_after_the_run(plain_module, make_trainer, clock) -> None:
    class Failing(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise ZeroDivisionError

    for callbacks in ([monitor_at(clock)], [monitor_at(clock), Failing()]):
        trainer = make_trainer(callbacks=callbacks)
        try:
            trainer.fit(timed(plain_module, clock))
        except ZeroDivisionError:
            assert len(callbacks) == 2
        assert not {"start", "stop"} & set(vars(trainer.profiler))


def test_a_recompilation_is_excluded(plain_module, make_trainer, read_column, clock) -> None:
    import torch

    def slow_compiler(graph: Any, example_inputs: Any) -> Any:
        clock.now += 32.0
        return graph.forward

    @torch.compile(backend=slow_compiler, dynamic=False)
    def total(x: Tensor) -> Tensor:
        return x.sum()

    class Compiled(plain_module):  # type: ignore[misc]
        def recipes_flops(self, batch: Any) -> SimpleNamespace:
            return SimpleNamespace(palm=1.0, causal=1.0)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            clock.now += 1.0
            width = 3 if batch_idx > 4 else 2  # another program from the sixth step on
            return super().training_step(batch, batch_idx) + 0.0 * total(torch.ones(width))

    torch._dynamo.reset()
    monitor = monitor_at(clock)
    make_trainer(callbacks=[monitor]).fit(Compiled())
    assert clock.now == 100.0 + 8 + 2 * 32
    assert read_column("time/step_seconds") == [1.0] * 7
    assert monitor.summary()["excluded_seconds"] == {"compile": 64.0, "first_step": 1.0}


def test_the_last_validation_is_part_of_the_excluded_seconds(plain_module, make_trainer, clock) -> None:
    monitor = monitor_at(clock)
    arguments = {"limit_val_batches": 2, "val_check_interval": 4}
    make_trainer(callbacks=[monitor], **arguments).fit(timed(plain_module, clock))
    excluded = {"first_step": STEP + FETCH, "validation": 2 * 2 * VALIDATION}
    assert monitor.summary()["excluded_seconds"] == excluded


def test_a_plain_module_has_samples_and_tokens_by_functions_of_the_batch(
    plain_module, make_trainer, read_column, clock
) -> None:
    monitor = SpeedMonitor(batch_size_fn=len, length_fn=lambda batch: batch.shape[1])
    monitor.clock = clock
    make_trainer(callbacks=[monitor]).fit(timed(plain_module, clock, counts=False))
    assert read_column("throughput/samples_per_second") == [1.0] * 7
    assert read_column("throughput/tokens_per_second") == [4.0] * 7
    assert monitor.summary()["tokens_per_second"] == 4.0


def test_attributes_of_someone_elses_module_are_not_taken_for_counts(
    plain_module, make_trainer, read_column, tmp_path, clock
) -> None:
    class Own(type(timed(plain_module, clock, counts=False))):  # type: ignore[misc]
        recipes_consumed = None  # as a module without it
        flops_of = log_row = save_weights = 3

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.num_samples, self.num_tokens = batch_idx, 50257
            return super().training_step(batch, batch_idx)

    make_trainer(callbacks=[monitor_at(clock)]).fit(Own())
    assert read_column("throughput/samples_per_second") == [1.0] * 7  # the batches of one row
    assert "tokens_per_second" not in (tmp_path / "run" / "metrics.csv").read_text()


@pytest.mark.parametrize("wrong", [{"peak_tflops": 0.0}, {"peak_tflops": float("nan")}, {"length_fn": len}])
def test_an_argument_that_cannot_work_is_an_error_that_names_it(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        SpeedMonitor(**wrong)
