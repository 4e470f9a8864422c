"""mode=lr_find from the command line: what it prints and draws, what it leaves, and what it rejects."""

import json
from pathlib import Path

import pytest
from report_pages import get_data
from support import TINY, run_train

from recipes.mode.lr_find import _write, read_range_test


def test_it_prints_a_suggestion_draws_the_curve_and_leaves_no_run(tmp_path: Path, text_folder: str) -> None:
    settings = [
        "mode=lr_find",
        "mode.num_steps=40",
        "mode.min_lr=1e-5",
        "mode.max_lr=10",
        f"mode.path={tmp_path}/found",
    ]
    done = run_train([*TINY, f"data.path={text_folder}", "trainer.accelerator=cpu", *settings], folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["found"]
    found = json.loads((tmp_path / "found/lr_find.json").read_text())
    assert found["learning_rates"][0] == pytest.approx(1e-5)
    assert 1e-4 < found["steepest"] <= found["lowest"] < found["diverges"] < 10
    assert f"suggestion: optimizer.lr={found['lowest']:.2g} " in done.stdout
    page = (tmp_path / "found/lr_find.html").read_text()
    [chart] = get_data(page)["charts"]
    assert len(chart["marks"]) == 3
    assert [curve["name"] for curve in chart["curves"]] == ["loss", "smoothed"]
    assert "NaN" not in page


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["mode.min_lr=1", "mode.max_lr=0.1"], "the range is empty"),
        (["mode.num_steps=3"], "mode.num_steps=3"),
        (["mode.min_lr=0"], "mode.min_lr=0"),
    ],
)
def test_a_mistake_is_answered(overrides: list[str], answer: str, tmp_path: Path) -> None:
    done = run_train(["tokenizer=bytes", "mode=lr_find", *overrides], folder=tmp_path)
    assert done.returncode == 2
    assert answer in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_loss_that_is_lost_is_written_as_json(tmp_path: Path) -> None:
    found = read_range_test([1e-3, 1e-2, 1e-1, 1.0], [3.0, 2.0, 2.5, float("nan")], width=1)
    _write(tmp_path, found, [], lambda *_: None)
    record = json.loads((tmp_path / "lr_find.json").read_text(), parse_constant=pytest.fail)
    assert record["losses"] == [3.0, 2.0, 2.5, None]
