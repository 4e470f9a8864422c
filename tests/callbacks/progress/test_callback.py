"""ProgressLine: one line per logged step, one per validation, and a bar that log records do not break."""

import io
import logging
import re
import sys
from typing import Any

import pytest
from rich.console import Console

from callbacks.progress import bar as live_bar
from callbacks.progress.bar import LiveBar, bar_line
from callbacks.progress.callback import ProgressLine
from callbacks.progress.text import clock_text, step_text, train_text, val_text

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


def test_a_process_without_logging_still_shows_lines(
    plain_module, make_trainer, clock, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    log = logging.getLogger(LOGGER)
    monkeypatch.setattr(log, "propagate", False)
    make_trainer(callbacks=[progress_at(clock)], max_steps=2).fit(plain_module())
    assert capsys.readouterr().err.startswith("step 1/2  loss ")
    assert log.handlers == []
    assert log.level == logging.NOTSET


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


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_a_line_never_reaches_the_edge_of_the_terminal(width: int) -> None:
    after = "loss 3.4512  val 3.6011  lr 9.8e-04  12,345 tok/s  0:32 left"
    line = bar_line(width, fraction=0.25, before="step 150/600", after=after)
    assert line.cell_len < width
    assert line.plain.startswith("step 150/600")
    if width >= 100:
        assert line.plain.endswith(after)


def test_a_quarter_of_forty_cells_is_ten() -> None:
    line = bar_line(200, fraction=0.25, before="step 1/4", after="loss 1")
    assert [span.end - span.start for span in line.spans] == [10, 30]


def test_text_formats() -> None:
    assert step_text(7, 600) == "step   7/600"
    assert step_text(7, None) == "step      7"
    metrics = {"train/loss": 3.45118, "lr": 9.8e-4, "throughput/tokens_per_second": 12345.4}
    assert train_text(metrics) == "loss 3.4512  lr 9.8e-04  12,345 tok/s"
    assert train_text({"loss": float("nan")}, val_loss=2.0) == "loss nan  val 2.0000"
    assert train_text({"throughput/samples_per_second": 2.345}) == "2.35 samples/s"
    assert val_text({"val/loss": 3.21, "val/accuracy": 0.5, "lr": 1}) == ("val loss 3.2100  accuracy 0.5000")
    assert val_text({"lr": 1.0}) == ""
    seconds = (0.4, 32, 725, 11045, 183845)
    assert [clock_text(s) for s in seconds] == ["0:00", "0:32", "12:05", "3:04:05", "2d 03:04"]


def test_there_is_no_state_to_save() -> None:
    assert ProgressLine().state_dict() == {}
