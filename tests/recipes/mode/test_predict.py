"""A row of predictions per sample, and metrics of a test split, of one small run of each kind of targets."""

import csv
import json
from pathlib import Path
from typing import Any

import dataset_cases
import pytest
import torch
from support import TINY, execute, write_texts

from recipes.build import build
from recipes.config import compose_and_check
from recipes.errors import ConfigError
from recipes.mode.export.record import make_example

ROWS = (
    *("task=regression", "data=dataset", "data.target_kind=values", "data.inputs=x", "data.targets=y"),
    "data.train={_target_: dataset_cases.Rows, seed: 1}",
    "data.val={_target_: dataset_cases.Rows, seed: 2}",
    "model._target_=dataset_cases.Perceptron",
)
TEST = "data.test={_target_: dataset_cases.Rows, seed: 3, num_rows: 11}"
SHORT = ("trainer.max_steps=2", "warmup_steps=0", "global_batch_size=8", "callbacks=[]", "save_every=2")


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regression")
    assert execute(*ROWS, TEST, *SHORT, f"hydra.run.dir={folder}") == 0
    return folder


CLASSES = (
    *("task=classification", "data=dataset", "model._target_=dataset_cases.OfThreeClasses"),
    *(f"data.{split}._target_=dataset_cases.OfFile" for split in ("train", "val")),
)


def write_rows(file: Path, num_rows: int, *, labels: bool = True) -> Path:
    """Write a CSV of rows whose class follows from their first number."""
    drawn = torch.rand(num_rows, 8, generator=torch.Generator().manual_seed(num_rows)).tolist()
    names = ["low", "middle", "high"]
    with file.open("w", newline="") as text:
        table = csv.writer(text)
        table.writerow([*(f"x{place}" for place in range(8)), *(["label"] if labels else [])])
        table.writerows([*row, *([names[int(3 * row[0])]] if labels else [])] for row in drawn)
    return file


@pytest.fixture(scope="module", params=["loss=cross_entropy", "loss._target_=dataset_cases.ClassesAlone"])
def classes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, list[str], Path]:
    """Return a run on classes whose training rows are gone, the classes to type, and its validation rows."""
    folder = tmp_path_factory.mktemp("classes")
    train, val = write_rows(folder / "train.csv", 24), write_rows(folder / "val.csv", 9)
    paths = [f"data.train.path={train}", f"data.val.path={val}"]
    typed = [*CLASSES, request.param]
    assert execute(*typed, *paths, *SHORT, "eval_every=2", f"hydra.run.dir={folder / 'run'}") == 0
    train.unlink()
    return folder / "run", typed, val


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_value_of_a_test_split_has_its_target_and_its_loss(regression: Path) -> None:
    assert execute(*ROWS, TEST, "mode=predict", "mode.split=test", f"resume={regression}") == 0
    rows = read_lines(regression / "predictions_test.jsonl")
    dataset = dataset_cases.Rows(seed=3, num_rows=11)
    assert [row["sample"] for row in rows] == list(range(11))
    for row in rows:
        assert row["target"] == pytest.approx(dataset[row["sample"]]["y"], rel=1e-6)
        assert row["loss"] == pytest.approx((row["values"][0] - row["target"][0]) ** 2, rel=1e-4)
    assert execute(*ROWS, TEST, "mode=test", f"resume={regression}") == 0
    measured = json.loads((regression / "evaluate_test.json").read_text())
    assert measured["samples"] == 11
    assert measured["loss"] == pytest.approx(sum(row["loss"] for row in rows) / 11, rel=1e-5)
    summary = json.loads((regression / "summary.json").read_text())
    assert summary["evaluations"]["test"]["loss"] == measured["loss"]


def test_a_table_has_a_column_per_number_of_the_best_checkpoint(regression: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    assert execute(*ROWS, TEST, "mode=predict", f"resume={regression / 'checkpoints/best'}", f"mode.path={file}") == 0
    with file.open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert list(rows[0]) == ["sample", "values_0", "target_0", "loss"]
    assert len(rows) == 37


def test_another_file_is_not_replaced_and_the_name_says_the_format(
    regression: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.csv").write_text("mine\n")
    assert execute(*ROWS, TEST, "mode=predict", f"resume={regression}", f"mode.path={tmp_path / 'notes.csv'}") == 2
    assert (tmp_path / "notes.csv").read_text() == "mine\n"
    assert execute(*ROWS, TEST, "mode=predict", f"resume={regression}", f"mode.path={tmp_path / 'p.txt'}") == 2
    shown = capsys.readouterr()
    assert f"type: mode.path={tmp_path / 'p.jsonl'}" in shown.out + shown.err


@pytest.mark.parametrize(
    ("typed", "kind", "columns"),
    [
        (("task=classification",), "classes", ["sample", "class", "probabilities", "target", "loss"]),
        (("task=multilabel",), "labels", ["sample", "labels", "probabilities", "target", "loss"]),
    ],
)
def test_classes_and_labels_come_with_their_probabilities(
    typed: tuple[str, ...], kind: str, columns: list[str], tmp_path: Path
) -> None:
    data = [f"data.{split}={{_target_: dataset_cases.Labelled, kind: {kind}}}" for split in ("train", "val")]
    model = ("model._target_=dataset_cases.Perceptron", "model.num_outputs=3", "metrics=none")
    own = ("data=dataset", f"data.target_kind={kind}")
    assert execute(*typed, *own, *data, *model, *SHORT, f"hydra.run.dir={tmp_path}") == 0
    assert execute(*typed, *own, *data, *model, "mode=predict", f"resume={tmp_path}") == 0
    rows = read_lines(tmp_path / "predictions_val.jsonl")
    assert len(rows) == 9
    for row in rows:
        assert list(row) == columns
        most = torch.tensor(row["probabilities"]).argmax().item()
        above = [int(probability > 0.5) for probability in row["probabilities"]]
        assert row.get("class", most) == most
        assert row.get("labels", above) == above
    assert (sum(rows[0]["probabilities"]) == pytest.approx(1.0)) == (kind == "classes")


def test_a_text_has_the_mean_loss_of_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = f"data.path={write_texts(tmp_path / 'texts')}"
    run = tmp_path / "run"
    assert execute(*TINY, data, "trainer.max_steps=1", "warmup_steps=0", f"hydra.run.dir={run}") == 0
    assert execute("mode=predict", f"resume={run}") == 0
    assert execute("mode=evaluate", f"resume={run}") == 0
    rows = read_lines(run / "predictions_val.jsonl")
    measured = json.loads((run / "evaluate_val.json").read_text())
    assert sum(row["loss"] for row in rows) / len(rows) == pytest.approx(measured["loss"], rel=1e-5)
    assert execute("mode=test", f"resume={run}") == 2
    shown = capsys.readouterr()
    assert "TextFiles keeps no part of the data for it" in shown.out + shown.err


def test_new_rows_without_a_target_get_the_name_and_the_probabilities_of_their_class(
    classes: tuple[Path, list[str], Path], tmp_path: Path
) -> None:
    run, typed, val = classes
    new = write_rows(tmp_path / "new.csv", 7, labels=False)
    val.rename(val.with_name("gone.csv"))
    try:
        ask = [*typed, "mode=predict", f"resume={run}"]
        assert execute(*ask, f"data.predict={{_target_: dataset_cases.OfFile, path: {new}}}") == 0
    finally:
        val.with_name("gone.csv").rename(val)
    rows = read_lines(run / "predictions_predict.jsonl")
    assert [row["sample"] for row in rows] == list(range(7))
    for row in rows:
        assert list(row) == ["sample", "class", "class_name", "probabilities"]
        assert row["class_name"] == ["low", "middle", "high"][row["class"]], "of the run, as the file has none"
        assert row["class"] == torch.tensor(row["probabilities"]).argmax().item()
        assert sum(row["probabilities"]) == pytest.approx(1.0)


def test_a_split_is_predicted_and_evaluated_and_the_model_exported_where_the_others_are_gone(
    classes: tuple[Path, list[str], Path],
) -> None:
    run, typed, val = classes
    assert execute(*typed, "mode=predict", f"resume={run}") == 0
    rows = read_lines(run / "predictions_val.jsonl")
    assert list(rows[0]) == ["sample", "class", "class_name", "probabilities", "target", "loss"]
    assert execute(*typed, "mode=evaluate", f"resume={run}") == 0
    measured = json.loads((run / "evaluate_val.json").read_text())
    assert measured["loss"] == pytest.approx(sum(row["loss"] for row in rows) / 9, rel=1e-5)
    correct = [row["class"] == row["target"] for row in rows]
    assert measured["accuracy"] == pytest.approx(sum(correct) / 9)
    val.rename(val.with_name("gone.csv"))
    try:
        assert execute(*typed, "mode=export", f"resume={run}") == 0
        composed, _ = compose_and_check([*typed, "mode=export", f"resume={run}"])
        assert composed is not None
        built = build(composed)
        with pytest.raises(ConfigError, match="where it was, or mode.format=safetensors"):
            make_example(built, built.task.meta_model())
    finally:
        val.with_name("gone.csv").rename(val)
    outputs = json.loads((run / "export/export.json").read_text())["outputs"]
    assert outputs["classes"] == ["low", "middle", "high"]


def test_new_rows_of_values_have_values_and_a_loss_that_says_nothing_of_its_outputs_predicts_none(
    regression: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = "data.predict={_target_: dataset_cases.Whatever, sample: {x: [0, 0, 0, 0, 0, 0, 0, 1.0]}}"
    assert execute(*ROWS, TEST, new, "mode=predict", f"resume={regression}") == 0
    rows = read_lines(regression / "predictions_predict.jsonl")
    assert [list(row) for row in rows] == [["sample", "values"]] * 5
    unknown = "loss._target_=dataset_cases.Unknown"
    labelled = [f"data.{split}={{_target_: dataset_cases.Labelled, kind: classes}}" for split in ("train", "val")]
    typed = ["task=classification", "data=dataset", *labelled, "model._target_=dataset_cases.OfThreeClasses", unknown]
    assert execute(*typed, *SHORT, "metrics=none", f"hydra.run.dir={tmp_path}") == 0
    assert execute(*typed, "metrics=none", "mode=predict", f"resume={tmp_path}") == 0
    shown = capsys.readouterr()
    assert 'type predicts = "classes" in that class' in shown.out + shown.err
    new = "data.predict={_target_: dataset_cases.Whatever, sample: {inputs: [0, 0, 0, 0, 0, 0, 0, 1.0]}}"
    assert execute(*typed, new, "metrics=none", "mode=predict", f"resume={tmp_path}") == 2
    shown = capsys.readouterr()
    assert "loss._target_=dataset_cases.Unknown" in shown.out + shown.err
