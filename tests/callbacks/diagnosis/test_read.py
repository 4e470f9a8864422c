"""Tables as other programs leave them: columns under other names, gaps, NaN, repeated headers, a last line cut off."""

import math
from pathlib import Path

import pytest

from callbacks.diagnosis.diagnose import diagnose_run
from callbacks.diagnosis.read import read_points, read_run

HEADER = "step,train/loss,val/loss\n"


def write(folder: Path, text: str) -> Path:
    (folder / "metrics.csv").write_text(text)
    return folder / "metrics.csv"


def test_empty_cells_are_left_out_and_nan_is_kept(tmp_path: Path) -> None:
    points, notes = read_points(write(tmp_path, HEADER + "1,3.5,\n2,nan,2.5\n4,-inf,\n"))
    assert points["val/loss"] == [(2, 2.5)]
    assert points["train/loss"][0] == (1, 3.5)
    assert math.isnan(points["train/loss"][1][1])
    assert points["train/loss"][2] == (4, -math.inf)
    assert notes == []


def test_a_line_that_is_cut_off_a_repeated_header_and_text_are_noted(tmp_path: Path) -> None:
    text = HEADER + "1,3.5,\n" + HEADER + "2,3.0,\nwhat is this\n3,2.5,\n4,2."
    points, notes = read_points(write(tmp_path, text))
    assert points["train/loss"] == [(1, 3.5), (2, 3.0), (3, 2.5)]
    assert notes == [
        "the header is repeated 1 times",
        "the last line is cut off and was skipped",
        "1 lines are not rows of this table and were skipped",
    ]


def test_a_gap_is_noted_with_its_steps(tmp_path: Path) -> None:
    rows = "".join(f"{step},3.0,\n" for step in [*range(1, 30), *range(500, 520)])
    assert read_points(write(tmp_path, HEADER + rows))[1] == ["1 gaps between rows, the first from step 29 to 500"]


def test_a_row_of_a_step_that_is_there_twice_counts_once_the_later_one(tmp_path: Path) -> None:
    points, notes = read_points(write(tmp_path, HEADER + "1,3,\n2,9,\n3,9,\n2,2,\n3,1,\n"))
    assert points["train/loss"] == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert notes == ["the steps go back 1 times; the later row of a repeated step counts"]


@pytest.mark.parametrize("step", ["step", "global_step", "trainer/global_step", "iter"])
def test_columns_under_other_names(tmp_path: Path, step: str) -> None:
    header = f"epoch,grad_2.0_norm_total,lr-AdamW/pg1,{step},train_loss_step,val_loss_epoch\n"
    run = read_run(write(tmp_path, header + "0,1.5,1e-3,0,3.0,\n0,1.5,1e-3,1.0,2.0,2.5\n"))
    assert run.curves.keys() == {"epoch", "grad_norm", "learning_rate", "loss", "val_loss"}
    assert list(run.curves["loss"].steps) == [0, 1]
    assert run.curves["learning_rate"].name == "lr-AdamW/pg1"


def test_a_byte_order_mark_and_another_file_name_are_read(tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    path.write_bytes(b"\xef\xbb\xbfstep,loss\r\n1,3.0\r\n2,2.0\r\n")
    assert list(read_run(path).curves["loss"].values) == [3.0, 2.0]


def test_the_files_beside_it_are_read_and_broken_ones_are_as_missing(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "1,3,\n")
    (tmp_path / "hparams.yaml").write_text("vocab_size: 100\n")
    (tmp_path / "events.jsonl").write_text('{"step": 0, "event": "start"}\n{"step": 1, "event": "end"}\n{"st')
    run = read_run(path)
    assert (run.num_classes, run.status, run.is_recipe) == (100, "finished", False)
    (tmp_path / "config.yaml").write_text("mode: {_target_: x}\ntrainer: {}\nmodel: {vocab_size: 50}\n")
    (tmp_path / "summary.json").write_text('{"status": "stopped"}')
    run = read_run(tmp_path)
    assert (run.num_classes, run.status, run.is_recipe) == (50, "stopped", True)
    (tmp_path / "config.yaml").write_text("loss: !!python/object:some.Loss {}\n")
    (tmp_path / "summary.json").write_text("{")
    assert (read_run(tmp_path).num_classes, read_run(tmp_path).status) == (100, "finished")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"epoch,loss\n1,2\n", "has no column of steps"),
        (b"step,loss\n", "has no row with a number"),
        (b"step,loss\n1,high\n", "has no row with a number"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "is not a text file"),
        (b"import torch\n", "its first line is 'import torch'"),
    ],
)
def test_what_is_no_table_of_metrics_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)


def test_a_folder_without_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no metrics\.csv"):
        read_run(tmp_path)


@pytest.mark.parametrize("row", ["1,3.0", "1,nan", "1,0", "1,-5", "1,1e300"])
@pytest.mark.parametrize("count", [1, 3, 50])
def test_short_and_constant_curves_are_examined(tmp_path: Path, row: str, count: int) -> None:
    value = row.partition(",")[2]
    text = "step,train/loss,lr,grad/norm,val/loss,epoch,precision/loss_scale,time/step_seconds,memory/host_peak_gib\n"
    text += "".join(f"{step},{','.join([value] * 8)}\n" for step in range(count))
    diagnosis = diagnose_run(write(tmp_path, text))
    assert len(diagnosis.examined) > 10
