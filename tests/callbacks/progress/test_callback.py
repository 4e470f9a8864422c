"""ProgressLine: one line per logged step, one per validation, and a bar that log records do not break."""

import io
import logging
import re
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from callbacks.progress import bar as live_bar
from callbacks.progress.bar import LiveBar, bar_line
from callbacks.progress.callback import ProgressLine
from callbacks.progress.text import clock_text, shown_text, step_text, train_text, val_text

LOGGER = "lightning_recipes"


def make_module(base: type, clock: Any) -> Any:
    """Make a module that logs this project's metric names in its own `on_train_batch_end`; a step takes 2 s."""

    class Named(base):  # type: ignore[misc]
        def training_step(self, *args: Any) -> Any:
            clock.now += 2.0
            return super().training_step(*args)

        def on_train_batch_end(self, *args: Any) -> None:
            if self.trainer.global_step % self.trainer.log_every_n_steps == 0:
                loss = self.trainer.global_step + 0.5
                self.log_dict({"train/loss": loss, "lr": 1e-3, "grad/norm": 0.25})

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", 3.25)

    return Named()


def progress_at(clock: Any) -> ProgressLine:
    progress = ProgressLine()
    progress.clock = clock
    return progress


def test_a_line_has_the_values_of_the_row_of_its_step(
    plain_module, make_trainer, clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)
    trainer = make_trainer(
        callbacks=[progress_at(clock)],
        log_every_n_steps=4,
        limit_val_batches=1,
        num_sanity_val_steps=1,
    )
    trainer.fit(make_module(plain_module, clock))
    assert [r.getMessage() for r in caplog.records if r.name == LOGGER] == [
        "step 4/8  loss 4.5000  grad 0.25  lr 1.0e-03  0:08 left",
        "step 8/8  loss 8.5000  grad 0.25  lr 1.0e-03  0:00 left",
        "step 8/8  val loss 3.2500",
    ]
    assert {vars(r)["console"] for r in caplog.records if r.name == LOGGER} == {True}


def test_the_row_of_a_step_that_was_rolled_back_has_the_number_of_that_step(
    plain_module, make_trainer, clock, caplog: pytest.LogCaptureFixture
) -> None:
    class RollBack(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:  # after step 5, whose row is written after this hook
                progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
                progress.completed = progress.ready = 2

    caplog.set_level(logging.INFO, logger=LOGGER)
    make_trainer(callbacks=[progress_at(clock), RollBack()]).fit(make_module(plain_module, clock))
    steps = [r.getMessage().partition("  ")[0] for r in caplog.records if r.name == LOGGER]
    assert steps == [f"step {number}/8" for number in (1, 2, 3, 4, 5, 3, 4, 5)]


def test_without_an_end_there_is_no_total_and_no_time_left(
    plain_module, make_trainer, clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)

    class Stopping(type(make_module(plain_module, clock))):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            self.trainer.should_stop = self.trainer.global_step >= 3
            return None

    make_trainer(callbacks=[progress_at(clock)], max_epochs=-1, max_steps=-1).fit(Stopping())
    lines = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    assert lines[0] == "step      1  loss 1.5000  grad 0.25  lr 1.0e-03"


def test_lightnings_usual_metric_names_are_understood(
    plain_module, make_trainer, clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)
    trainer = make_trainer(callbacks=[progress_at(clock)], limit_val_batches=1, log_every_n_steps=8)
    trainer.fit(plain_module())
    row, validation = (r.getMessage() for r in caplog.records if r.name == LOGGER)
    assert re.fullmatch(r"step 8/8  loss \d\.\d{4}  0:00 left", row)
    assert re.fullmatch(r"step 8/8  val loss \d\.\d{4}", validation)


def reset_logging(monkeypatch: pytest.MonkeyPatch, root_handlers: list[logging.Handler]) -> logging.Logger:
    """Configure the root logger as `logging.basicConfig()` does, with these handlers and at WARNING."""
    log = logging.getLogger(LOGGER)
    # a run in this process may have opened its console
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "level", logging.NOTSET)
    monkeypatch.setattr(logging.root, "handlers", root_handlers)
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    log.manager._clear_cache()  # type: ignore[attr-defined]
    return log


@pytest.mark.parametrize("configured", ["not at all", "basicConfig()", "basicConfig(filename=)"])
def test_lines_are_shown_once_whatever_the_logging_of_the_process(
    plain_module, make_trainer, clock, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path, configured: str
) -> None:
    handlers: dict[str, list[logging.Handler]] = {
        "not at all": [],
        "basicConfig()": [logging.StreamHandler(sys.stderr)],
        "basicConfig(filename=)": [logging.FileHandler(tmp_path / "log")],
    }
    log = reset_logging(monkeypatch, handlers[configured])
    make_trainer(callbacks=[progress_at(clock)], max_steps=2).fit(plain_module())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert [line.partition("  loss ")[0] for line in lines] == ["step 1/2", "step 2/2"]
    assert log.handlers == []
    assert log.level == logging.NOTSET


def test_a_level_that_was_set_on_the_logger_is_respected(plain_module, make_trainer, monkeypatch, capsys) -> None:
    log = reset_logging(monkeypatch, [])
    monkeypatch.setattr(log, "level", logging.ERROR)
    log.manager._clear_cache()  # type: ignore[attr-defined]
    make_trainer(callbacks=[ProgressLine()], max_steps=2).fit(plain_module())
    log.manager._clear_cache()  # type: ignore[attr-defined]
    assert "step 1/2" not in capsys.readouterr().err


def test_a_plain_trainer_has_one_progress_bar_and_none_when_it_is_disabled(plain_module, make_trainer, caplog) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)
    progress = ProgressLine()
    trainer = make_trainer(callbacks=[progress], enable_progress_bar=True)
    assert [each for each in trainer.callbacks if isinstance(each, ProgressBar)] == [progress]
    with pytest.raises(MisconfigurationException, match="enable_progress_bar=False"):
        make_trainer(callbacks=[ProgressLine()], enable_progress_bar=False)
    progress.disable()
    trainer.fit(plain_module())
    assert [r for r in caplog.records if r.getMessage().startswith("step")] == []


def test_epochs_and_what_the_module_shows_are_in_the_line_and_an_epochs_mean_in_one_of_its_own(
    plain_module, make_trainer, clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)

    class Epochs(plain_module):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch[0]).square().mean()
            self.log("train/loss", 0.25 * loss.detach() / loss.detach(), on_step=False, on_epoch=True, prog_bar=True)
            if batch_idx == 7:
                self.log("pace", 7.0, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("accuracy", 0.5)

    options = {"max_epochs": 2, "log_every_n_steps": 4, "limit_val_batches": 1}
    make_trainer(callbacks=[progress_at(clock)], **options).fit(Epochs())
    lines = [r.getMessage().removesuffix("  0:00 left") for r in caplog.records if r.name == LOGGER]
    assert lines == [
        "epoch 1/2  step  4/16",
        "epoch 1/2  step  8/16  pace 7.0000",
        "epoch 1/2  step  8/16  val accuracy 0.5000",
        "epoch 1/2  step  8/16  epoch mean  train/loss 0.2500",
        "epoch 2/2  step 12/16",
        "epoch 2/2  step 16/16  pace 7.0000",
        "epoch 2/2  step 16/16  val accuracy 0.5000",
        "epoch 2/2  step 16/16  epoch mean  train/loss 0.2500",
    ]


@pytest.mark.parametrize("max_steps", [-1, 10])
def test_two_optimizers_count_batches_not_the_steps_of_both(
    plain_module, make_trainer, clock, caplog: pytest.LogCaptureFixture, max_steps: int
) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)

    class ByHand(plain_module):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.layer(batch[0]).square().mean())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([p], lr=0.01) for p in self.layer.parameters()]

    make_trainer(callbacks=[progress_at(clock)], max_steps=max_steps).fit(ByHand())
    lines = [r.getMessage().partition("  ")[0] for r in caplog.records if r.name == LOGGER]
    total = 8 if max_steps == -1 else 5  # ten steps of two optimizers
    assert lines == [f"step {n}/{total}" for n in range(1, total + 1)]


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_rows_skip_the_console_and_handlers_are_restored(
    plain_module, make_trainer, clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, file = FakeTerminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    console = Console(file=terminal, force_terminal=True, width=100, legacy_windows=False)
    monkeypatch.setattr(live_bar, "Console", lambda stderr: console)
    log = logging.getLogger(LOGGER)
    to_console, to_file = logging.StreamHandler(terminal), logging.StreamHandler(file)
    to_console.addFilter(lambda record: vars(record).get("console", True))
    monkeypatch.setattr(log, "handlers", [to_console, to_file])
    monkeypatch.setattr(log, "level", logging.INFO)
    log.manager._clear_cache()  # type: ignore[attr-defined]

    module = make_module(plain_module, clock)
    module.on_train_start = lambda: log.info("a record in mid-run")
    make_trainer(callbacks=[progress_at(clock)], log_every_n_steps=4).fit(module)
    log.manager._clear_cache()  # type: ignore[attr-defined]

    assert file.getvalue().splitlines()[1].startswith("step 4/8  loss 4.5000")
    shown = terminal.getvalue()
    assert "\x1b[2Ka record in mid-run\n" in shown  # the bar's line is erased, then drawn again
    assert "step 8/8" in shown
    assert "0:08 left\n" not in shown
    assert to_console.stream is terminal
    assert sys.stderr is terminal


def test_the_bar_is_redrawn_at_most_four_times_a_second(
    plain_module, make_trainer, monkeypatch: pytest.MonkeyPatch, clock
) -> None:
    draws: list[str] = []
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(LiveBar, "start", lambda self: None)
    monkeypatch.setattr(LiveBar, "draw", lambda self, **parts: draws.append(parts["before"]))

    class Quick(plain_module):  # type: ignore[misc, valid-type]
        def training_step(self, *args: Any) -> Any:
            clock.now += 0.125
            return super().training_step(*args)

    make_trainer(callbacks=[progress_at(clock)]).fit(Quick())
    assert draws == [f"step {n}/8" for n in (0, 2, 4, 6, 8)]


def test_on_a_terminal_validation_test_and_prediction_have_their_own_progress(
    plain_module, make_trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws: list[str] = []
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(LiveBar, "start", lambda self: None)
    monkeypatch.setattr(LiveBar, "stop", lambda self: None)
    monkeypatch.setattr(LiveBar, "draw", lambda self, **parts: draws.append(parts["before"]))
    progress = ProgressLine(refresh_per_second=1e9)
    module = plain_module()
    module.test_step = module.predict_step = lambda batch, batch_idx: None
    trainer = make_trainer(callbacks=[progress], limit_val_batches=2, max_steps=1, val_check_interval=1)
    trainer.fit(module)
    trainer.test(module, dataloaders=module.val_dataloader(), verbose=False)
    trainer.predict(module, dataloaders=module.val_dataloader())
    assert draws[1:] == [
        "step 0/1", "validation 1/2", "validation 2/2", "step 1/1", "test 1/2", "test 2/2", "prediction 1/2",
        "prediction 2/2",
    ]  # fmt: skip


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_that_is_not_above_zero_is_an_error(rate: float) -> None:
    with pytest.raises(ValueError, match="refresh_per_second is"):
        ProgressLine(refresh_per_second=rate)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_a_line_never_reaches_the_edge_of_the_terminal(width: int) -> None:
    after = "loss 3.4512  val 3.6011  lr 9.8e-04  12,345 tok/s  0:32 left"
    line = bar_line(width, fraction=0.25, before="step 150/600", after=after)
    assert line.cell_len < width
    assert line.plain.startswith("step 150/600")
    if width >= 100:
        assert line.plain.endswith(after)


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (90, "loss 3.4512  val 3.6011  grad 1.09  lr 9.8e-04  12,345 tok/s  0:32 left"),
        (80, "loss 3.4512  val 3.6011  grad 1.09  12,345 tok/s  0:32 left"),
        (60, "loss 3.4512  12,345 tok/s  0:32 left"),
        (40, "loss 3.4512  0:32 left"),
    ],
)
def test_a_narrow_line_keeps_the_loss_and_the_time_left(width: int, shown: str) -> None:
    after = "loss 3.4512  val 3.6011  grad 1.09  lr 9.8e-04  12,345 tok/s  0:32 left"
    assert bar_line(width, fraction=0.25, before="step 150/600", after=after).plain == f"step 150/600  {shown}"


def test_a_quarter_of_forty_cells_is_ten() -> None:
    line = bar_line(200, fraction=0.25, before="step 1/4", after="loss 1")
    assert [span.end - span.start for span in line.spans] == [10, 30]


def test_text_formats() -> None:
    assert step_text(7, 600) == "step   7/600"
    assert step_text(7, None) == "step      7"
    metrics = {"train/loss": 3.45118, "lr": 9.8e-4, "throughput/tokens_per_second": 12345.4}
    assert train_text(metrics) == "loss 3.4512  lr 9.8e-04  12,345 tok/s"
    of_policy = {"train/loss": 1e-9, "reward/mean": 0.5, "grad/norm": 0.81}
    assert train_text(of_policy) == "reward 0.5000  grad 0.81"
    assert train_text({"loss": float("nan")}, val_loss=2.0) == "loss nan  val 2.0000"
    assert train_text({"throughput/samples_per_second": 2.345}) == "2.35 samples/s"
    assert val_text({"val/loss": 3.21, "val/accuracy": 0.5}) == ("val loss 3.2100  accuracy 0.5000")
    assert val_text({}) == ""
    shown = {"train_loss": 1.0, "acc": 0.5, "v_num": 3, "name": "x"}
    assert shown_text(shown, beside={"train_loss_step": 1.0}) == "acc 0.5000  name x"
    seconds = (0.4, 32, 725, 11045, 183845)
    assert [clock_text(s) for s in seconds] == ["0:00", "0:32", "12:05", "3:04:05", "2d 03:04"]


def test_there_is_no_state_to_save() -> None:
    assert ProgressLine().state_dict() == {}
