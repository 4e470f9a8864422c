"""The part of a page on a classifier: the accuracy of each class, the confusion matrix or its pairs, the mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from callbacks.report.classes import read_classes
from callbacks.report.page import write_report

RECORD: dict[str, Any] = {
    "split": "val",
    "step": 8,
    "class_names": ["cat", "dog", "<b>"],
    "samples": [8, 4, 4],
    "right": [6, 1, 4],
    "pairs": [[1, 2, 3], [0, 1, 2]],
    "mistakes": [{"loss": 3.25, "target": 1, "predicted": 2, "image": "aGVsbG8="}],
}


def test_each_class_has_its_accuracy_and_what_it_is_taken_for() -> None:
    shown = read_classes(RECORD)
    assert shown is not None
    assert shown.note == "16 samples at step 8, 68.8% right"
    assert shown.rows == [
        ("dog", "4", "25.0%", "<b> (3)"),
        ("cat", "8", "75.0%", "dog (2)"),
        ("<b>", "4", "100.0%", ""),
    ]
    assert [(cell.text, cell.share, cell.is_right) for cell in shown.cells] == [
        *(("6", 0.75, True), ("2", 0.25, False), ("1", 0.25, True), ("3", 0.75, False), ("4", 1.0, True))
    ]
    assert shown.cells[3].title == "dog taken for <b>: 3, 75.0% of the class"
    assert (shown.cells[3].x, shown.cells[3].y) == (2 * shown.cell_size, shown.cell_size)
    assert not shown.pairs
    assert shown.mistakes == [("aGVsbG8=", "dog taken for <b>", "loss 3.25")]


def test_a_thousand_classes_have_their_worst_pairs_in_place_of_a_matrix() -> None:
    samples = [9 + {7: 90, 5: 3, 9: 1}.get(number, 0) for number in range(1000)]
    record = {"split": "test", "samples": samples, "right": [9] * 1000, "pairs": [[7, 8, 90], [5, 6, 3], [9, 1, 1]]}
    shown = read_classes(record)
    assert shown is not None
    assert not shown.cells
    assert shown.pairs == [("7", "8", "90", "90.9%"), ("5", "6", "3", "25.0%"), ("9", "1", "1", "10.0%")]
    assert len(shown.rows) == 50
    assert shown.rows[0] == ("7", "99", "9.1%", "8 (90)")
    assert shown.of_rows == "the 50 worst of 1,000 classes"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"pairs": [[0, -1, 2]]}, "[0, -1, 2] is not a class, a prediction and a count"),
        ({"pairs": [[0, 1, "<x>"]]}, "[0, 1, '<x>'] is not a class, a prediction and a count"),
        ({"samples": [8, 4]}, "more predictions of a class than samples are counted"),
        ({"samples": None}, "samples are not the counts of classes"),
        ({"mistakes": [{"target": 0}]}, "{'target': 0} is not a mistake with a class and a prediction"),
    ],
)
def test_what_is_damaged_is_named(damage: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="is not a|of classes|of a class") as error:
        read_classes(RECORD | damage)
    assert str(error.value) == message


def test_the_page_shows_them_escaped(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/loss\n8,1.0\n")
    (tmp_path / "classes_val.json").write_text(json.dumps(RECORD | {"split": "other"}))
    (tmp_path / "classes_test.json").write_text('{"samples": [0], "right": [0]}')
    (tmp_path / "classes_train.json").write_text('{"samples": [1], "right": [1], "pairs": [[1]]}')
    evil = {"loss": 1, "target": 0, "predicted": 1, "image": '"><script>'}
    (tmp_path / "classes_x.json").write_text(json.dumps(RECORD | {"mistakes": [evil]}))
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "Classes of val</h2>" in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page.partition("Classes of val")[2].partition("</section>")[0]
    assert '<img src="data:image/png;base64,aGVsbG8="' in page
    assert "<script>" not in page.partition("Classes of x")[2].partition("</section>")[0]
    assert "classes_train.json could not be read: [1] is not a class, a prediction and a count" in page
