"""Rows of a run as another process reads them: only complete ones, also while the file is rewritten."""

from pathlib import Path

import pytest

from recipes.sweep import progress as module
from recipes.sweep.progress import Progress


def test_a_missing_or_empty_file_has_no_rows(tmp_path: Path) -> None:
    progress = Progress(tmp_path, 10)
    assert progress.read() == []
    (tmp_path / "metrics.csv").write_text("")
    assert progress.read() == []
    assert progress.step == 0
    assert progress.seconds_left() is None


def test_half_a_row_is_not_read_and_the_newest_row_is_read_again(tmp_path: Path) -> None:
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


def test_a_file_rewritten_with_another_column_is_read_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("step,train/loss\n1,5.5\n2,5.2\n")
    progress = Progress(tmp_path, 10)
    progress.read()
    rewritten = tmp_path / "metrics.tmp"
    rewritten.write_text("step,train/loss,val/loss\n1,5.5,\n2,5.2,5.0\n3,4.9,\n")
    rewritten.replace(file)
    assert [row["step"] for row in progress.read()] == [1, 2, 3]
    assert progress.last["val/loss"] == 5.0


def test_the_step_decreases_when_a_run_rolls_back(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("step,train/loss\n" + "".join(f"{step},5.0\n" for step in range(1, 9)))
    progress = Progress(tmp_path, 10)
    progress.read()
    assert progress.step == 8
    rewritten = tmp_path / "metrics.tmp"
    rewritten.write_text("step,train/loss\n1,5.0\n2,5.0\n")
    rewritten.replace(file)
    progress.read()
    assert progress.step == 2


def test_the_time_left_is_the_remaining_steps_at_the_observed_pace(
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


@pytest.mark.parametrize("partial_row", ["2,1e-,", "x,3,", "2,\0\0,", ",5.0,"])
def test_a_row_that_is_being_overwritten_is_read_again(tmp_path: Path, partial_row: str) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text(f"step,train/loss,val/loss\n1,5.5,\n{partial_row}\n")
    progress = Progress(tmp_path, 10)
    assert [row["step"] for row in progress.read()] == [1]
    file.write_text("step,train/loss,val/loss\n1,5.5,\n2,5.2,\n3,5.0,\n")
    progress.read()
    assert progress.step == 3


def test_a_file_that_lost_rows_to_a_rollback_and_grew_again_is_read_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("step,train/loss,grad/norm\n1,5.5,1.0\n2,5.4,1.0\n3,5.3,1.0\n")
    progress = Progress(tmp_path, 10)
    assert len(progress.read()) == 3
    # the same file, and not shorter: where row 3 was there is now the middle of row 2
    file.write_text("step,train/loss,grad/norm\n1,5.5,1.0\n2,nan,123456789.123456789\n")
    assert progress.read()[-1] == {
        "step": 2,
        "train/loss": pytest.approx(float("nan"), nan_ok=True),
        "grad/norm": 123456789.123456789,
    }
    assert progress.step == 2
    # another row 2 begins where row 2 was
    file.write_text("step,train/loss,grad/norm\n1,5.5,1.0\n3,5.3,1.0\n")
    assert [row["step"] for row in progress.read()] == [1, 3]
