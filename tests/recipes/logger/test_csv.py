"""One row per logged optimizer step, however it is logged; a resumed file has no row twice."""

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import read_metrics

from recipes.logger.csv import CsvLogger


def test_everything_logged_for_a_step_is_one_row_and_the_first_step_is_1(tmp_path: Path) -> None:
    logger = CsvLogger(run_folder=tmp_path)
    logger.log_metrics({"train/loss": 3.0, "epoch": 0}, step=0)
    logger.log_metrics({"train/loss": 2.0, "lr": 0.1, "epoch": 0}, step=1)
    logger.log_metrics({"val/loss": 2.5}, step=1)
    logger.finalize("success")
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "step,train/loss,lr,val/loss",
        "1,3,,",
        "2,2,0.1,2.5",
    ]


def test_a_row_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    logger = CsvLogger(run_folder=tmp_path)
    logger.log_metrics({"train/loss": 3.0}, step=0)
    assert read_metrics(tmp_path) == [{"step": 1, "train/loss": 3}]
    logger.log_metrics({"train/loss": 2.0}, step=1)
    logger.log_metrics({"val/loss": 2.5}, step=1)
    logger.log_metrics({"train/loss": 1.0}, step=2)
    logger.log_metrics({"val/loss": 0.5}, step=2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert [row.get("val/loss") for row in read_metrics(tmp_path)] == [None, 2.5, 0.5]


def test_a_float32_loss_and_a_count_beyond_float32_are_written_exactly(tmp_path: Path) -> None:
    logger = CsvLogger(run_folder=tmp_path)
    logger.log_metrics({"train/loss": 0.10000000149011612, "train/tokens": 2.0**40 + 1}, step=0)
    logger.finalize("success")
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1] == "1,0.100000001,1099511627777"


def test_a_resumed_run_replaces_the_rows_from_its_step_on(tmp_path: Path) -> None:
    before = CsvLogger(run_folder=tmp_path)
    for step in range(5):
        before.log_metrics({"train/loss": float(step)}, step=step)
    before.finalize("failed")
    after = CsvLogger(run_folder=tmp_path)
    after.resume_at(3)
    after.log_metrics({"train/loss": 30.0}, step=3)
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["train/loss"] for row in rows] == [0, 1, 2, 30]


def test_a_line_torn_by_a_kill_is_dropped_at_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/loss,lr\n1,3.0,0.1\n2,2.")
    logger = CsvLogger(run_folder=tmp_path)
    logger.resume_at(2)
    logger.log_metrics({"train/loss": 1.0, "lr": 0.2}, step=2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]


def test_an_event_is_one_line_of_json(tmp_path: Path) -> None:
    logger = CsvLogger(run_folder=tmp_path)
    logger.log_event("checkpoint", 4, path="step_0000004.ckpt")
    logger.log_event("end", 5)
    first, second = (json.loads(line) for line in (tmp_path / "events.jsonl").open())
    assert (first["event"], first["step"], first["path"]) == ("checkpoint", 4, "step_0000004.ckpt")
    assert second["event"] == "end"


@contextlib.contextmanager
def no_file_grows_beyond(num_bytes: int) -> Iterator[None]:
    """Make the kernel reject writes after that byte, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_that_a_full_disk_rejects_are_written_once_it_has_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    logger = CsvLogger(run_folder=tmp_path)
    logger.log_metrics({"train/loss": 1.25}, step=0)
    size = (tmp_path / "metrics.csv").stat().st_size
    with no_file_grows_beyond(size + 3):
        for step in (1, 2, 3):
            logger.log_metrics({"train/loss": step + 1.25}, step=step)
            logger.log_metrics({"val/loss": step + 2.25} if step == 2 else {}, step=step)
        rows = [line for line in (tmp_path / "metrics.csv").open() if line.endswith("\n")]
        assert len(rows) == 2  # the header and the first
    [message] = caplog.messages
    assert message == f"{tmp_path}/metrics.csv could not be written: File too large. The run goes on"
    logger.log_metrics({"train/loss": 5.25}, step=4)
    logger.finalize("success")
    assert caplog.messages[1:] == [f"{tmp_path}/metrics.csv is written again"]
    assert read_metrics(tmp_path) == [
        {"step": step, "train/loss": step + 0.25} | ({"val/loss": 4.25} if step == 3 else {})
        for step in (1, 2, 3, 4, 5)
    ]


def test_a_rollback_on_a_full_disk_leaves_each_step_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = CsvLogger(run_folder=tmp_path)
    for step in range(4):
        logger.log_metrics({"train/loss": step + 1.25}, step=step)
    with no_file_grows_beyond((tmp_path / "metrics.csv").stat().st_size - 12):
        for step in (4, 5):
            logger.log_metrics({"train/loss": step + 1.25}, step=step)
        logger.on_rollback(None, None, 6, 3)
        assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
        logger.log_metrics({"train/loss": 40.5}, step=3)
        logger.on_rollback(None, None, 4, 2)
    logger.log_metrics({"train/loss": 30.5}, step=2)
    logger.log_metrics({"train/loss": 40.5}, step=3)
    assert [row["train/loss"] for row in read_metrics(tmp_path)] == [1.25, 2.25, 30.5, 40.5]
    assert "metrics.csv could not be written" in caplog.messages[0]


def test_a_rollback_to_a_step_that_a_full_disk_rejected_keeps_its_row(tmp_path: Path) -> None:
    logger = CsvLogger(run_folder=tmp_path)
    logger.log_metrics({"train/loss": 1.25}, step=0)
    with no_file_grows_beyond((tmp_path / "metrics.csv").stat().st_size + 3):
        for step in (1, 2, 3):
            logger.log_metrics({"train/loss": step + 1.25}, step=step)
        logger.on_rollback(None, None, 4, 3)
    logger.log_metrics({"val/loss": 9.5}, step=2)
    logger.log_metrics({"train/loss": 40.5}, step=3)
    assert read_metrics(tmp_path) == [
        {"step": 1, "train/loss": 1.25},
        {"step": 2, "train/loss": 2.25},
        {"step": 3, "train/loss": 3.25, "val/loss": 9.5},
        {"step": 4, "train/loss": 40.5},
    ]


def test_events_that_a_full_disk_rejects_are_written_once_it_has_space(tmp_path: Path) -> None:
    logger = CsvLogger(run_folder=tmp_path)
    logger.log_event("start", 0)
    with no_file_grows_beyond((tmp_path / "events.jsonl").stat().st_size + 3):
        logger.log_event("checkpoint_failed", 2)
        logger.log_event("checkpoint_failed", 4)
    logger.log_event("checkpoint", 6)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").open()]
    assert [(event["event"], event["step"]) for event in events] == [
        ("start", 0),
        ("checkpoint_failed", 2),
        ("checkpoint_failed", 4),
        ("checkpoint", 6),
    ]
