"""Loggers of other packages get the rows of metrics.csv, each once, in one run of theirs, also after a crash."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from faults import FaultAt
from recording_logger import RecordingLogger, read_calls
from support import TINY, composed_config, read_metrics, resolved

from recipes.build import build
from recipes.config import compose_and_check
from recipes.entry.run import run_resolved
from recipes.errors import ConfigError
from recipes.logger.aim import make_aim_logger
from recipes.logger.any_logger import AnyLogger


def train(folder: Path, text_folder: str, *more: str, target: str | None = "recording_logger.RecordingLogger") -> int:
    typed = [*TINY, f"data.path={text_folder}", f"hydra.run.dir={folder}", "save_every=4", "eval_every=4", *more]
    if target is not None:
        typed += [f"++logger.mine._target_={target}", f"+logger.mine.folder={folder.parent / 'service'}"]
    composed, errors = compose_and_check(typed)
    assert composed is not None
    assert not errors, [str(error) for error in errors]
    return run_resolved(composed)


def rows_of(path: Path) -> dict[int, dict[str, float]]:
    """Return the newest values of each step."""
    rows: dict[int, dict[str, float]] = {}
    for call in read_calls(path, "row"):
        step = call.pop("step")
        rows[step] = rows.get(step, {}) | call
    return rows


def in_csv(folder: Path) -> dict[int, dict[str, float]]:
    return {int(row.pop("step")): row for row in read_metrics(folder)}


def assert_as_in_csv(path: Path, folder: Path) -> None:
    found, expected = rows_of(path), in_csv(folder)
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        # a step that was trained twice also has what was measured only the first time, such as its speed
        newest = {name: value for name, value in found[step].items() if name in row}
        assert newest == pytest.approx(row, rel=1e-8, abs=0), step  # the file has nine digits


def test_a_run_passes_on_its_config_and_each_row_once_with_the_steps_of_metrics_csv(
    tmp_path: Path, text_folder: str
) -> None:
    assert train(tmp_path / "run", text_folder, "trainer.max_steps=6") == 0
    [path] = (tmp_path / "service").iterdir()
    assert_as_in_csv(path, tmp_path / "run")
    assert [call["step"] for call in read_calls(path, "row")] == [1, 2, 3, 4, 5, 6]
    assert "val/loss" in rows_of(path)[4]
    assert read_calls(path, "config") == [{"seed": 1234}]
    assert read_calls(path, "end") == [{"status": "success"}]


def test_a_run_that_crashed_goes_on_in_the_run_of_the_service(tmp_path: Path, text_folder: str) -> None:
    more = ["trainer.max_steps=10", "resume=auto"]
    crash = "+callbacks.crash={_target_: support.CrashAt, step: 7}"
    assert train(tmp_path / "run", text_folder, *more, crash) == 1
    assert train(tmp_path / "run", text_folder, *more) == 0
    [path] = (tmp_path / "service").iterdir()
    assert_as_in_csv(path, tmp_path / "run")
    assert len(read_calls(path, "open")) == 2
    assert len(read_calls(path, "config")) == 1


def test_a_service_that_takes_new_runs_only_has_the_whole_curve_in_the_last(tmp_path: Path, text_folder: str) -> None:
    more, target = ["trainer.max_steps=10", "resume=auto"], "recording_logger.NewRunsOnly"
    crash = "+callbacks.crash={_target_: support.CrashAt, step: 7}"
    assert train(tmp_path / "run", text_folder, *more, crash, target=target) == 1
    assert train(tmp_path / "run", text_folder, *more, target=target) == 0
    first, last = sorted((tmp_path / "service").iterdir())
    assert max(rows_of(first)) == 7
    assert_as_in_csv(last, tmp_path / "run")


def test_rows_that_a_kill_kept_from_the_service_are_sent_at_the_resume(tmp_path: Path) -> None:
    rows = "".join(f"{step},{step}.5\n" for step in range(1, 6))
    (tmp_path / "metrics.csv").write_text(f"step,train/loss\n{rows}")
    (tmp_path / "logger_runs.json").write_text('{"logger.mine": {"run": "of_before", "sent": 2}}')
    logger = make_logger(tmp_path)
    logger.log_event("resume", 4)  # the checkpoint is of step 4
    logger.log_metrics({"train/loss": 6.0}, step=4)
    logger.finalize("success")
    sent = read_calls(tmp_path / "service/of_before.jsonl", "row")
    assert sent == [{"step": step, "train/loss": loss} for step, loss in ((3, 3.5), (4, 4.5), (5, 6.0))]


def test_steps_that_were_rolled_back_have_the_values_of_their_second_time(tmp_path: Path, text_folder: str) -> None:
    spikes = [
        "callbacks=[grad_norm,loss_scale,loss_spike]",
        *(f"callbacks.loss_spike.{text}" for text in ("window=32", "warmup_steps=16")),
        *(f"callbacks.loss_spike.{text}" for text in ("snapshot_every=10", "quarantine_steps=10")),
    ]
    overrides = [text for text in TINY if not text.startswith("~")] + spikes
    overrides += [f"data.path={text_folder}", "scheduler=constant", "optimizer.lr=1e-3", "seed=3", "save_every=10"]
    overrides += ["eval_every=20", "trainer.max_steps=50", "+logger.mine._target_=recording_logger.RecordingLogger"]
    config = composed_config(*overrides, f"+logger.mine.folder={tmp_path / 'service'}")
    run = build(resolved(config, tmp_path))
    run.trainer.callbacks.insert(0, FaultAt(kind="weight", step=36))  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    [path] = (tmp_path / "service").iterdir()
    assert len(read_calls(path, "row")) > 50
    assert_as_in_csv(path, tmp_path)


def test_a_service_that_fails_costs_its_rows_and_not_the_run(tmp_path: Path, text_folder: str) -> None:
    assert train(tmp_path / "run", text_folder, "trainer.max_steps=6", "+logger.mine.fails_at=3") == 0
    [path] = (tmp_path / "service").iterdir()
    assert sorted(rows_of(path)) == [1, 2]
    assert len(in_csv(tmp_path / "run")) == 6
    expected = "logger.mine gets no further rows: ConnectionError: the service is away; metrics.csv has every row"
    assert (tmp_path / "run/train.log").read_text().count(expected) == 1


def lack_package() -> None:
    raise ModuleNotFoundError("'p>=1' not met. HINT: Try running `pip install -U 'p>=1'`")  # as Lightning says it


@pytest.mark.parametrize(
    ("constructor", "message"),
    [
        (dict, "logger.mine._target_=…: dict is no logger of Lightning; type '~logger.mine'"),
        (lambda: RecordingLogger(), "logger.mine=…: TypeError: RecordingLogger.__init__\\(\\) missing 1 required"),
        (lack_package, "logger.mine=…: ModuleNotFoundError: 'p>=1' not met.; type pip install -U 'p>=1'$"),
    ],
)
def test_a_logger_that_cannot_be_constructed_ends_the_run_before_its_first_step(
    constructor: Any, message: str, tmp_path: Path
) -> None:
    logger = AnyLogger(key="logger.mine", construct=constructor, run_folder=tmp_path)
    with pytest.raises(ConfigError, match=message):
        logger.log_event("start", 0)


def make_logger(folder: Path, key: str = "logger.mine") -> AnyLogger:
    def construct(run_id: str | None = None) -> RecordingLogger:
        return RecordingLogger(str(folder / "service"), run_id)

    return AnyLogger(key=key, construct=construct, run_folder=folder)


def test_the_runs_of_several_services_are_remembered_although_each_has_a_thread(tmp_path: Path) -> None:
    loggers = [make_logger(tmp_path, key=f"logger.{name}") for name in ("first", "second", "third")]
    for step in range(100):
        for logger in loggers:
            logger.log_event("checkpoint" if step else "start", step)
    for logger in loggers:
        logger.finalize("success")
    runs = json.loads((tmp_path / "logger_runs.json").read_text())
    assert {key: run["sent"] for key, run in runs.items()} == dict.fromkeys(
        ("logger.first", "logger.second", "logger.third"), 99
    )


def test_what_is_logged_without_a_step_is_in_the_newest_row(tmp_path: Path) -> None:
    logger = make_logger(tmp_path)
    logger.log_event("start", 0)
    logger.log_metrics({"before": 1.0})
    for step in (0, 1):
        logger.log_metrics({"train/loss": 3.0 - step}, step=step)
    logger.log_metrics({"of_module": 5.0})
    logger.finalize("success")
    expected = {1: {"before": 1.0, "train/loss": 3.0}, 2: {"train/loss": 2.0, "of_module": 5.0}}
    assert rows_of(tmp_path / "service" / "run_0.jsonl") == expected
    assert logger.experiment is None  # the other logger has none, and a module may ask for it


@pytest.mark.skipif(find_spec("aim") is not None, reason="Aim is installed")
def test_a_run_with_aim_names_the_package_that_is_missing() -> None:
    with pytest.raises(ConfigError, match="logger=aim: aim is not installed; type pip install aim"):
        make_aim_logger(repo=".", experiment="mine", run_name=None, system_tracking_interval=None)


class Disabled(RecordingLogger):
    """One that takes everything and records nothing, as Comet's does with online=false."""

    @property
    def experiment(self) -> Any:
        class OfflineExperiment:
            disabled = True

        return OfflineExperiment()


def test_a_run_of_a_service_that_records_nothing_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(tmp_path / "service")
    logger = AnyLogger(key="logger.mine", construct=lambda: Disabled(folder), run_folder=tmp_path)
    logger.log_event("start", 0)
    assert "logger.mine records nothing: its OfflineExperiment is disabled" in caplog.messages
