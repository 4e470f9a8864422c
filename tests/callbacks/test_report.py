"""The report of a run: complete, escaped, small, and there however the run ended."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from callbacks.report import RunReport
from callbacks.report_page import how_it_ended, write_report
from callbacks.run_record import read_run

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
EVIL = "</script><script>alert(1)</script>&\"'"


def write_run(folder: Path, metrics: str, **files: Any) -> Path:
    """A run folder: summary, environment as JSON, events and samples as JSON lines, config as text."""
    (folder / "metrics.csv").write_text(metrics)
    for name in ("summary", "environment"):
        if name in files:
            (folder / f"{name}.json").write_text(json.dumps(files[name]))
    for name in ("events", "samples"):
        if name in files:
            lines = "".join(json.dumps(line) + "\n" for line in files[name])
            (folder / f"{name}.jsonl").write_text(lines)
    if "config" in files:
        (folder / "config.yaml").write_text(files["config"])
    return folder


def page_of(folder: Path) -> str:
    write_report(folder)
    assert not list(folder.glob(".*.partial"))
    return (folder / "report.html").read_text()


class Balance(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag


def test_everything_that_a_run_left_is_on_its_page(tmp_path: Path) -> None:
    page = page_of(
        write_run(
            tmp_path,
            "step,train/loss,val/loss,lr,grad/norm\n1,3.5,,0.1,1.0\n2,2.5,2.75,0.2,9.0\n",
            summary={
                "status": "finished",
                "val_loss": 2.75,
                "tokens_per_second": 41230.4,
                "mfu": None,
            },
            environment={
                "devices": ["H100"] * 8,
                "command": "python train.py seed=3",
                "versions": {"torch": "2.13.0"},
            },
            events=[{"time": 0, "step": 2, "event": "spike", "score": 11.25}],
            samples=[
                {"step": 1, "prompt": "old", "text": "old"},
                {"step": 2, "prompt": "x", "text": "yz"},
            ],
            config="name: my_run\nseed: 3\n",
        )
    )
    for words in (
        "my_run",
        "finished",
        "41,230",
        "python train.py seed=3",
        "versions.torch",
        "8 x H100",
    ):
        assert words in page
    for words in ("score 11.25", "yz", "seed: 3", "1 spike", "unknown", "grad/norm"):
        assert words in page
    assert "old" not in page
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG_SIGNATURE)
    balance = Balance()
    balance.feed(page)
    assert balance.open == []


def test_the_page_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, "step,train/loss\n1,3\n2,2\n"))
    assert re.findall(r"https?://|\bsrc=|\bhref=|@import|url\(", page) == []


def test_what_a_run_wrote_cannot_become_markup(tmp_path: Path) -> None:
    page = page_of(
        write_run(
            tmp_path,
            "step,train/loss\n1,3\n",
            summary={"status": EVIL, "note": EVIL},
            environment={"command": EVIL, EVIL: EVIL},
            events=[
                {"step": 1, "event": EVIL, "why": EVIL},
                {"step": 1, "event": "stop", EVIL: EVIL},
            ],
            samples=[{"step": 1, "prompt": EVIL, "text": EVIL}],
            config=f"name: {EVIL}\n",
        )
    )
    assert page.count("<script") == 2
    assert "<script>alert" not in page


def test_one_row_is_a_dot(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, "step,train/loss\n7,3.5\n"))
    assert 'class="curve dots c0" d="M500 500h0"' in page


def test_losses_that_are_not_finite_are_told(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, "step,train/loss\n1,3.5\n2,nan\n3,inf\n"))
    assert "train/loss: 2 of 3 not finite, first at step 2" in page
    data = re.search(r'id="points">(.*?)</script>', page, flags=re.DOTALL)
    assert data is not None
    curves = json.loads(data.group(1))["charts"][0]["curves"]
    assert curves == [{"metric": "train/loss", "points": [[1, 3.5], [2, None], [3, None]]}]


@pytest.mark.parametrize(
    "metrics", ["step,train/loss\n1,nan\n", "step,train/loss\n", "step,x\n1,2\n"]
)
def test_a_run_with_nothing_to_draw_has_a_page_all_the_same(tmp_path: Path, metrics: str) -> None:
    assert "<h1>" in page_of(write_run(tmp_path, metrics))


def test_classification_shows_its_accuracy(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, "step,train/loss,val/accuracy\n1,3,\n2,2,0.875\n"))
    assert "<dt>val accuracy</dt><dd>0.875" in page
    assert "<b>accuracy</b>" in page


def test_a_hundred_thousand_rows_stay_under_a_megabyte(tmp_path: Path) -> None:
    names = ("train/loss", "lr", "grad/norm", "throughput/tokens_per_second")
    rows = (
        f"{s},{3 + s % 13 / 7},{s / 3e8},{s % 11 / 3},{40000 + s % 997}" for s in range(100_000)
    )
    page = page_of(write_run(tmp_path, f"step,{','.join(names)}\n" + "\n".join(rows) + "\n"))
    assert len(page) < 1_000_000


@pytest.mark.parametrize(
    ("files", "status"),
    [
        ({}, None),
        ({"events": [{"step": 0, "event": "start"}]}, "running"),
        ({"events": [{"step": 9, "event": "end"}]}, "finished"),
        ({"events": [{"step": 9, "event": "preempted"}]}, "preempted"),
        ({"events": [{"step": 9, "event": "end"}], "summary": {"status": "diverged"}}, "diverged"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, files: dict[str, Any], status: str | None) -> None:
    assert how_it_ended(read_run(write_run(tmp_path, "step,a\n1,1\n", **files))) == status


def test_a_strangers_fit_leaves_picture_and_page(stranger, make_trainer, tmp_path) -> None:
    make_trainer(callbacks=[RunReport()], limit_val_batches=1).fit(stranger())
    page = (tmp_path / "run" / "report.html").read_text()
    assert "train_loss" in page
    assert "val_loss" in page
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000


def test_a_run_that_fails_leaves_its_page_and_its_own_error(
    stranger, make_trainer, tmp_path
) -> None:
    class Failing(stranger):  # type: ignore[misc, valid-type]
        def on_train_batch_end(self, *args: Any) -> None:
            if self.trainer.global_step == 3:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer(callbacks=[RunReport()]).fit(Failing())
    assert "train_loss" in (tmp_path / "run" / "report.html").read_text()


def test_a_report_that_fails_costs_the_run_nothing(
    stranger, make_trainer, tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run" / "report.html").mkdir(parents=True)  # where the page should go
    make_trainer(callbacks=[RunReport()], max_steps=2).fit(stranger())
    assert "could not be written" in caplog.text
    assert "IsADirectoryError" in caplog.text


def test_without_metrics_there_is_a_line_in_the_log(
    stranger, make_trainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lightning_recipes")
    make_trainer(callbacks=[RunReport()], max_steps=1, logger=False).fit(stranger())
    assert "no report: no logger left a metrics.csv" in caplog.text


def test_there_is_no_state_to_carry_over() -> None:
    assert RunReport().state_dict() == {}
