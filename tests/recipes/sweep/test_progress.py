"""Rows of a run as another process reads them: whole ones, each new one once, whatever happens to the file."""

from pathlib import Path

import pytest

from recipes.sweep import progress as module
from recipes.sweep.progress import Progress


def test_nothing_is_read_where_nothing_is(tmp_path: Path) -> None:
    progress = Progress(tmp_path, 10)
    assert progress.read() == []
    (tmp_path / "metrics.csv").write_text("")
    assert progress.read() == []
    assert progress.step == 0
    assert progress.seconds_left() is None


def test_half_a_row_waits_for_its_end_and_the_newest_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("step,train/loss,val/loss\n1,5.5,\n2,5.2")
    progress = Progress(tmp_path, 10)
    assert progress.read() == [{"step": 1, "train/loss": 5.5}]
    file.write_text("step,train/loss,val/loss\n1,5.5,\n2,5.25,\n")
    assert progress.read() == [{"step": 1, "train/loss": 5.5}, {"step": 2, "train/loss": 5.25}]
    file.write_text("step,train/loss,val/loss\n1,5.5,\n2,5.25,5.1\n3,5.0,\n")
    assert progress.read() == [
        {"step": 2, "train/loss": 5.25, "val/loss": 5.1},
        {"step": 3, "train/loss": 5.0},
    ]
    assert progress.step == 3
    assert progress.last == {"step": 3, "train/loss": 5.0, "val/loss": 5.1}


def test_a_file_written_anew_with_another_column_is_read_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("step,train/loss\n1,5.5\n2,5.2\n")
    progress = Progress(tmp_path, 10)
    progress.read()
    other = tmp_path / "metrics.tmp"
    other.write_text("step,train/loss,val/loss\n1,5.5,\n2,5.2,5.0\n3,4.9,\n")
    other.replace(file)
    assert [row["step"] for row in progress.read()] == [1, 2, 3]
    assert progress.last["val/loss"] == 5.0


def test_a_run_that_goes_back_is_followed_back(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("step,train/loss\n" + "".join(f"{step},5.0\n" for step in range(1, 9)))
    progress = Progress(tmp_path, 10)
    progress.read()
    assert progress.step == 8
    other = tmp_path / "metrics.tmp"
    other.write_text("step,train/loss\n1,5.0\n2,5.0\n")
    other.replace(file)
    progress.read()
    assert progress.step == 2


def test_the_time_left_is_that_of_the_steps_left_at_the_pace_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 104.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    file = tmp_path / "metrics.csv"
    file.write_text("step,train/loss\n10,5.0\n")
    progress = Progress(tmp_path, 50)
    progress.read()  # at 100 s
    file.write_text("step,train/loss\n10,5.0\n18,5.0\n")
    progress.read()
    assert progress.seconds_left() == pytest.approx(4.0 / 8 * 32)


@pytest.mark.parametrize("odd", ["2,1e-,", "x,3,", "2,\0\0,", ",5.0,"])
def test_a_row_that_is_half_of_what_it_will_be_is_read_again(tmp_path: Path, odd: str) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text(f"step,train/loss,val/loss\n1,5.5,\n{odd}\n")
    progress = Progress(tmp_path, 10)
    assert [row["step"] for row in progress.read()] == [1]
    file.write_text("step,train/loss,val/loss\n1,5.5,\n2,5.2,\n3,5.0,\n")
    progress.read()
    assert progress.step == 3
