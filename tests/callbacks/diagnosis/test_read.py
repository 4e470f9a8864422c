"""Tables as other programs leave them: columns under other names, gaps, NaN, repeated headers, a last line cut off."""

import json
import math
from pathlib import Path

import pytest

from callbacks.diagnosis.diagnose import diagnose_run
from callbacks.diagnosis.read import read_points, read_run, read_runs

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
        (b'step,loss\n1,"' + b"3\n" * 100_000, "is not a table: field larger than field limit"),
        (b'{"history": 5}', "has no rows"),
        (b'{"log_history": null}', "has no rows"),
        (b"[" * 200_000, "has no rows"),
        (b'{"a":' * 200_000, "has no rows"),
    ],
)
def test_what_is_no_table_of_metrics_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)


def test_a_folder_without_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no metrics\.csv"):
        read_run(tmp_path)


LOSSES = [3.0, 2.5, 2.0]
LOG_HISTORY = [
    {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 1e-3, "loss": 3.0, "step": 10},
    {"epoch": 0.2, "grad_norm": 1.2, "learning_rate": 1e-3, "loss": 2.5, "step": 20},
    {"epoch": 0.2, "eval_loss": 2.4, "eval_runtime": 1.0, "step": 20},
    {"epoch": 0.3, "grad_norm": 1.1, "learning_rate": 1e-3, "loss": 2.0, "step": 30},
    {"epoch": 0.3, "train_loss": 2.5, "train_runtime": 9.0, "step": 30},
]
KERAS = {"loss": LOSSES, "val_loss": [3.1, 2.9, 2.8], "accuracy": [0.1, 0.2, 0.3]}
# name of a file, its content, the steps of the training loss, and the other roles
FORMATS = {
    "the export of a W&B chart": (
        "wandb.csv",
        '"Step","run-a - train/loss","run-a - train/loss__MIN","run-a - train/loss__MAX"\n'
        '"0","3.0","1","9"\n"10","2.5","1","9"\n"20","2.0","1","9"\n',
        [0, 10, 20],
        set(),
    ),
    "the history of a run, by W&B's client": (
        "history.csv",
        ",_step,_runtime,train/loss,eval/loss\n0,0,1.5,3.0,\n1,1,1.6,2.5,2.9\n2,2,1.7,2.0,\n",
        [0, 1, 2],
        {"val_loss"},
    ),
    "TensorBoard's CSV, whose file names the metric": (
        "run-version_0-tag-train_loss.csv",
        "Wall time,Step,Value\n1700000000.0,0,3.0\n1700000001.0,10,2.5\n1700000002.0,20,2.0\n",
        [0, 10, 20],
        set(),
    ),
    "TensorBoard's JSON": (
        "run-.-tag-Loss_train.json",
        "[[1700000000.0, 0, 3.0], [1700000001.0, 10, 2.5], [1700000002.0, 20, 2.0]]",
        [0, 10, 20],
        set(),
    ),
    "trainer_state.json of transformers": (
        "trainer_state.json",
        json.dumps({"best_metric": None, "global_step": 30, "log_history": LOG_HISTORY}),
        [10, 20, 30],
        {"val_loss", "learning_rate", "grad_norm", "epoch"},
    ),
    "JSON Lines, the last one cut off": (
        "trainer_log.jsonl",
        "".join(f'{{"current_steps": {i + 1}, "loss": {loss}, "lr": 0.1}}\n' for i, loss in enumerate(LOSSES))
        + '{"cur',
        [1, 2, 3],
        {"learning_rate"},
    ),
    "the table in a notebook of transformers": (
        "notebook.tsv",
        "Step\tTraining Loss\tValidation Loss\n10\t3.0\t3.1\n20\t2.5\t2.9\n30\t2.0\t2.8\n",
        [10, 20, 30],
        {"val_loss"},
    ),
    "CSVLogger of Keras": (
        "training.log",
        "epoch,accuracy,loss,val_loss\n0,0.1,3.0,3.1\n1,0.2,2.5,2.9\n2,0.3,2.0,2.8\n",
        [0, 1, 2],
        {"val_loss"},
    ),
    "the history of Keras as JSON": ("history.json", json.dumps(KERAS), [0, 1, 2], {"val_loss"}),
    "CSVLogger of Lightning, with a row for each epoch": (
        "metrics.csv",
        "epoch,step,train_loss_epoch,train_loss_step,val_loss\n0,49,,3.0,\n0,99,,2.5,\n0,99,,,2.9\n0,99,2.7,,\n1,149,,2.0,\n",
        [49, 99, 149],
        {"val_loss", "epoch"},
    ),
    "MLflow's metric history": (
        "history.csv",
        "run_id,key,value,timestamp,step,is_nan\n"
        + "".join(
            f"8f3,train_loss,{loss},170000000{i},{i},False\n8f3,val_loss,3,1,{i},False\n"
            for i, loss in enumerate(LOSSES)
        ),
        [0, 1, 2],
        {"val_loss"},
    ),
    "a metric in MLflow's folder": (
        "train_loss",
        "1700000000000 3.0 0\n1700000001000 2.5 5\n1700000002000 2.0 10\n",
        [0, 5, 10],
        set(),
    ),
    "semicolons and decimal commas, with a hint for spreadsheets": (
        "export.csv",
        "sep=;\nStep;Train Loss;LR\n1;3,0;1e-3\n2;2,5;0,001\n1000;2,0;0,001\n",
        [1, 2, 1000],
        {"learning_rate"},
    ),
    "names in capital letters, after a byte order mark": (
        "export.csv",
        "\ufeffGlobal Step,Training_Loss,Eval Loss\n1,3.0,\n2,2.5,2.9\n3,2.0,\n",
        [1, 2, 3],
        {"val_loss"},
    ),
}


@pytest.mark.parametrize("what", FORMATS)
def test_files_of_other_programs_are_read(tmp_path: Path, what: str) -> None:
    name, text, steps, roles = FORMATS[what]
    (tmp_path / name).write_text(text, encoding="utf-8")
    run = read_run(tmp_path / name)
    assert list(run.curves["loss"].values) == LOSSES
    assert list(run.curves["loss"].steps) == steps
    assert run.curves.keys() == {"loss", *roles}


def test_each_run_of_a_file_is_read_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "wandb.csv").write_text(
        '"Step","lr - 1e-3 - train/loss","lr - 1e-3 - train/loss__MIN","b - train/loss","b - val/loss"\n'
        '"0","3.0","1","","2.9"\n"10","","","2.5","2.8"\n'
    )
    (tmp_path / "mlflow.csv").write_text("Run,metric,step,value\nx,loss,1,3\ny,loss,1,2\nx,loss,2,2.5\n")
    wandb, mlflow = read_runs(tmp_path / "wandb.csv"), read_runs(tmp_path / "mlflow.csv")
    assert {
        name: dict(zip(run.curves["loss"].steps, run.curves["loss"].values, strict=True)) for name, run in wandb.items()
    } == {
        "lr - 1e-3": {0: 3.0},
        "b": {10: 2.5},
    }
    assert list(wandb["b"].curves["val_loss"].values) == [2.9, 2.8]
    assert {name: list(run.curves["loss"].values) for name, run in mlflow.items()} == {"x": [3.0, 2.5], "y": [2.0]}
    assert list(read_run(tmp_path / "mlflow.csv", run="y").curves["loss"].values) == [2.0]
    with pytest.raises(ValueError, match="holds the runs x, y; choose one of them"):
        read_run(tmp_path / "mlflow.csv")


def test_columns_of_the_same_name_are_different_curves_and_noted(tmp_path: Path) -> None:
    (tmp_path / "wandb.csv").write_text(
        '"Step","a - loss","a - loss__MIN","b - loss","a - loss","a - loss__MIN"\n0,3,1,5,4,1\n1,2,1,5,3,1\n'
    )
    runs = read_runs(tmp_path / "wandb.csv")
    assert {name: list(run.curves["loss"].values) for name, run in runs.items()} == {
        "a": [3.0, 2.0],
        "b": [5.0, 5.0],
        "a (2)": [4.0, 3.0],
    }
    assert runs["a"].notes == ["columns of the same name are numbered: a (2) - loss"]
    points, notes = read_points(write(tmp_path, "step,loss,loss\n1,3,4\nstep,loss,loss\n2,2,3\n"))
    assert points == {"loss": [(1, 3.0), (2, 2.0)], "loss (2)": [(1, 4.0), (2, 3.0)]}
    assert notes == ["columns of the same name are numbered: loss (2)", "the header is repeated 1 times"]


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("step\tloss\n1\t3\n1,000\t2\n", {1: 3.0, 1000: 2.0}),
        ("step\tloss\n1,000\t2.125\n2,000\t1,234.5\n", {1000: 2.125, 2000: 1234.5}),
        ('step,loss\n1,"0,52"\n2,"0,5"\n', {1: 0.52, 2: 0.5}),
        ('step,loss\n"1,000",0.520\n"2,000",0.5\n', {1000: 0.52, 2000: 0.5}),
        ("step;loss\n1;0,520\n2;1,250\n", {1: 0.52, 2: 1.25}),  # no thousand begins with 0
        ("step;loss\n1;2,490\n2;2,480\n", {1: 2.49, 2: 2.48}),  # as spreadsheets write where the comma is decimal
        ("step;loss\n1;2,490\n2;1,234,567\n", {1: 2490.0, 2: 1234567.0}),
        ("step;loss\n1.000;3,5\n2.000;1.234,5\n", {1000: 3.5, 2000: 1234.5}),
        ("step;loss\n1;-3,5e-1\n2;+,5\n", {1: -0.35, 2: 0.5}),
        ("step,loss\r1,3.5\r2,2.5\r", {1: 3.5, 2: 2.5}),  # lines that end with a carriage return alone
    ],
)
def test_the_numbers_of_a_file_decide_whether_its_commas_are_decimal(
    tmp_path: Path, text: str, points: dict[int, float]
) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(text.encode())
    assert dict(read_points(path)[0]["loss"]) == points


def test_commas_that_could_be_either_are_noted(tmp_path: Path) -> None:
    points, notes = read_points(write(tmp_path, "step\tloss\n1\t2,345\n2\t1,987\n"))
    assert points["loss"] == [(1, 2345.0), (2, 1987.0)]
    assert notes == ["its commas are read as separators of thousands"]


def test_values_without_a_name_are_taken_as_the_loss_and_a_value_beside_other_metrics_is_one_of_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "tb.csv").write_text("Wall time,Step,Value\n1,0,3.0\n2,10,2.5\n")
    run = read_run(tmp_path / "tb.csv")
    assert list(run.curves["loss"].values) == [3.0, 2.5]
    assert "taken as the training loss; to name them, call the file tag-<metric>.csv" in run.notes[0]
    (tmp_path / "ppo.csv").write_text("step,loss,value\n0,3.0,0.5\n10,2.5,0.6\n")
    assert list(read_run(tmp_path / "ppo.csv").curves["loss"].values) == [3.0, 2.5]


def test_a_table_without_steps_says_what_to_do(tmp_path: Path) -> None:
    text = '"Relative Time (Process)","run-a - train/loss"\n"0.5","3.0"\n"1.5","2.5"\n'
    with pytest.raises(
        ValueError, match="rename the column of steps to step, or export again with the step as the x axis"
    ):
        read_run(write(tmp_path, text))
    with pytest.raises(ValueError, match="JSON is read as one object per step"):
        read_run(write(tmp_path, "[1, 2]"))


@pytest.mark.parametrize("row", ["1,3.0", "1,nan", "1,0", "1,-5", "1,1e300"])
@pytest.mark.parametrize("count", [1, 3, 50])
def test_short_and_constant_curves_are_examined(tmp_path: Path, row: str, count: int) -> None:
    value = row.partition(",")[2]
    text = "step,train/loss,lr,grad/norm,val/loss,epoch,precision/loss_scale,time/step_seconds,memory/host_peak_gib\n"
    text += "".join(f"{step},{','.join([value] * 8)}\n" for step in range(count))
    diagnosis = diagnose_run(write(tmp_path, text))
    assert len(diagnosis.examined) > 10


@pytest.mark.parametrize("end", [b"\xff\xfe\x00", bytes(300), bytes(3) + b"\n"])
def test_a_last_line_that_a_loss_of_power_has_left_is_no_row(end: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "1,3.5,\n2,3,\n")
    path.write_bytes(path.read_bytes() + end)
    points, notes = read_points(path)
    assert points["train/loss"] == [(1, 3.5), (2, 3.0)]
    assert notes == ["its last line holds NUL bytes and is left out"]
    path.write_bytes(end)
    with pytest.raises(ValueError, match="is not a text file|has no column of steps"):
        read_points(path)
