"""The report of a run: complete, escaped, small, and written however the run ended."""

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from markupsafe import escape
from report_pages import get_data, get_points

from callbacks.report.callback import RunReport
from callbacks.report.page import get_plan, measured_values, planned_values, write_report
from callbacks.report.run_record import get_status, read_run

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
EVIL = "</script><script>alert(1)</script>&\"'"


def write_run(folder: Path, metrics: str, **files: Any) -> Path:
    """Write a run folder: summary and environment as JSON, events and samples as JSON lines, config as text."""
    (folder / "metrics.csv").write_text(metrics)
    for name in ("summary", "environment"):
        if name in files:
            (folder / f"{name}.json").write_text(json.dumps(files[name]))
    for name in ("events", "samples", "answers"):
        if name in files:
            lines = "".join(json.dumps(line) + "\n" for line in files[name])
            (folder / f"{name}.jsonl").write_text(lines)
    if "config" in files:
        (folder / "config.yaml").write_text(files["config"])
    return folder


def make_page(folder: Path) -> str:
    """Write the report of a folder and return its page."""
    write_report(folder)
    assert not list(folder.glob(".*.partial"))
    return (folder / "report.html").read_text()


class Balance(HTMLParser):
    """Asserts that every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "path", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag


def test_the_page_shows_every_file_of_the_run(tmp_path: Path) -> None:
    page = make_page(
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
                {"step": 1, "prompt": "an old prompt", "text": "an old text"},
                {"step": 2, "prompt": "x", "text": "yz"},
            ],
            config="name: my_run\nseed: 3\n",
        )
    )
    for text in (
        "my_run",
        "finished",
        "41,230",
        "python train.py seed=3",
        "torch 2.13.0",
        "8 x H100",
    ):
        assert text in page
    for text in ("score 11.25", "yz", "seed: 3", "spike &times; 1", "unknown", "grad/norm"):
        assert text in page
    assert "an old" not in page
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG_SIGNATURE)
    balance = Balance()
    balance.feed(page)
    assert balance.open == []


def rows_of(page: str, section: str) -> list[list[str]]:
    """Return the text of the cells of a section's first table."""
    table = page.split(f'<section id="{section}">')[1].split("</table>")[0]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, flags=re.DOTALL) for row in table.split("<tr>")[1:]]
    return [[html.unescape(cell) for cell in row] for row in rows]


def test_answers_of_the_start_are_beside_the_newest_ones_whatever_was_resumed(tmp_path: Path) -> None:
    def answer(step: int, number: int, given: str, score: float) -> dict[str, Any]:
        known = {"question": f"{number}?", "expected": f"yes {number}", "rejected": f"no {EVIL}"}
        return {"step": step, "given": given, "score": score} | known

    answers = [answer(0, number, f"start {number}", 0.0) for number in range(20)]
    answers += [answer(50, number, "in mid-run", 0.0) for number in range(20)]
    answers += [answer(step, number, f"{step}: {number}\n", number % 2) for step in (90, 90) for number in range(20)]
    page = make_page(write_run(tmp_path, "step,train/loss\n1,3\n90,2\n", answers=answers))
    head, *rows = rows_of(page, "answers")
    assert head == ["question", "answer of the start", "answer at step 90", "chosen", "rejected"]
    assert rows[3] == ["3?", "start 3", "90: 3\n", "yes 3", f"no {EVIL}"]
    assert len(rows) == 12
    assert "12 of 20 questions; right: 0% at the start, 50% now" in page
    assert "in mid-run" not in page
    assert "<script>alert" not in page


def test_answers_without_a_start_or_a_rejected_one_have_no_column_for_them(tmp_path: Path) -> None:
    answers = [{"step": 5, "question": "a?", "expected": "b", "given": "c", "score": 0.0}, {"step": "x"}, {}]
    page = make_page(write_run(tmp_path, "step,train/loss\n1,3\n5,2\n", answers=answers))
    assert rows_of(page, "answers") == [["question", "answer at step 5", "expected"], ["a?", "c", "b"]]


def test_a_run_without_tokens_has_no_figure_of_them(tmp_path: Path) -> None:
    for number, (tokens, is_shown) in enumerate(((0, False), (20, True))):
        folder = tmp_path / str(number)
        folder.mkdir()
        page = make_page(write_run(folder, "step,train/loss\n1,3\n5,2\n", summary={"steps": 5, "tokens": tokens}))
        tiles = page.split('class="tiles"')[1].split("<nav")[0]
        assert (">tokens<" in tiles) is is_shown


def test_the_page_loads_nothing_from_the_network(tmp_path: Path) -> None:
    page = make_page(write_run(tmp_path, "step,train/loss\n1,3\n2,2\n"))
    without = page.replace("https://github.com/leeoniya/uPlot", "")  # in a comment
    assert re.findall(r"https?://|\bsrc=|@import|url\(|fetch\(|\bimport\(", without) == []
    links = re.findall(r'href="([^"]*)"', page)
    assert all(link.startswith(("#", "data:,", "spikes/")) for link in links), links


def test_text_from_a_run_is_escaped(tmp_path: Path) -> None:
    page = make_page(
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
    page = make_page(write_run(tmp_path, "step,train/loss\n7,3.5\n"))
    assert get_points(page, "train/loss") == [(7, 3.5)]
    assert (get_data(page)["first"], get_data(page)["last"]) == (6, 8)


NESTED = json.dumps({"a": 1}).replace("1", '{"a": 1}')
for _ in range(6):
    NESTED = NESTED.replace("1", NESTED)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3", "[" * 100_000, NESTED, '{"a": ' + "9" * 5000 + "}"])
@pytest.mark.parametrize("name", ["summary.json", "plan.json", "environment.json"])
def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_written(
    name: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path, "step,train/loss\n1,3.5\n2,3\n", config="name: mine\n")
    (folder / name).write_text(text)
    page = make_page(folder)
    assert f'<p class="damage">{name} could not be read: ' in page
    assert f"{folder}: {name} could not be read: " in caplog.text
    assert get_points(page, "train/loss") == [(1, 3.5), (2, 3)]
    assert "name: mine" in page
    assert (folder / "curves.png").is_file()


HOSTILE: list[Any] = [EVIL, {"a": [EVIL]}, [], [[1]], True, -(10**400), float("nan"), float("inf"), 1e308]
TIMELINES: list[Any] = [
    3,
    {"gib": {}, "sections": []},
    {"gib": {"a": [1]}, "sections": ["x", "y"]},
    {"gib": {"a": [1], "b": [1, 2]}, "sections": ["x"]},
    {"gib": {"a": [EVIL]}, "sections": ["x"]},
    {"gib": {"a": [float("nan")]}, "sections": ["x"]},
    {"gib": {"a": [1e308, 1e308]}, "sections": ["x", "y"]},
    {"gib": [[1]], "sections": [EVIL]},
    {"gib": {EVIL: [1]}, "sections": [3]},
]
KEYS = ["train_loss", "val_loss", "best_val_loss", "mfu", "steps", "tokens", "seconds", "peak_memory_gib", "status"]


@pytest.mark.parametrize("value", HOSTILE)
def test_no_value_of_a_summary_or_a_plan_stops_the_report(value: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path, "step,train/loss\n1,3.5\n2,3\n", summary=dict.fromkeys([*KEYS, EVIL], value))
    keys = ["step_seconds", "seconds", "peak_memory_gib", "usable_gib", "timeline", "num_parameters", "mfu", EVIL]
    (folder / "plan.json").write_text(json.dumps(dict.fromkeys(keys, value)))
    page = make_page(folder)
    assert "plan.json could not be read: its timeline has no gib by name, and sections" in page
    assert page.count("<script") == 2
    assert get_points(page, "train/loss") == [(1, 3.5), (2, 3)]
    if not isinstance(value, float):
        assert "summary.json could not be read: its val_loss is not a finite number" in page


@pytest.mark.parametrize("timeline", TIMELINES)
def test_a_plan_with_a_damaged_timeline_is_named_and_the_rest_is_shown(timeline: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path, "step,train/loss\n1,3.5\n", summary={"seconds": 4.0})
    (folder / "plan.json").write_text(json.dumps({"seconds": 2.0, "timeline": timeline}))
    page = make_page(folder)
    assert "plan.json could not be read: its timeline has no " in page
    assert "<td>200.0%</td>" in page
    assert page.count("<script") == 2


def test_losses_that_are_not_finite_are_noted(tmp_path: Path) -> None:
    page = make_page(write_run(tmp_path, "step,train/loss\n1,3.5\n2,nan\n3,inf\n"))
    assert "train/loss: 2 of 3 not finite, first at step 2" in page
    [curve] = get_data(page)["charts"][0]["curves"]
    assert curve == {
        "name": "train/loss",
        "color": "c0",
        "steps": [1, 1, 1],
        "values": [3.5, None, None],
        "rolled_back": [],
        "trend": {"steps": [], "values": []},
    }


@pytest.mark.parametrize("metrics", ["step,train/loss\n1,nan\n", "step,train/loss\n", "step,x\n1,2\n"])
def test_a_run_with_nothing_to_draw_still_has_a_page(tmp_path: Path, metrics: str) -> None:
    assert "<h1>" in make_page(write_run(tmp_path, metrics))


def test_a_policy_shows_its_rewards_first_and_no_loss_as_a_figure(tmp_path: Path) -> None:
    rows = "step,train/loss,reward/mean,reward/numeric,val/reward\n1,1e-9,0.25,0.25,\n2,0,0.5,0.5,0.625\n"
    page = make_page(write_run(tmp_path, rows))
    assert "<dt>reward</dt><dd>0.5" in page
    assert "<dt>val reward</dt><dd>0.625" in page
    assert "<dt>train loss</dt>" not in page


def test_classification_shows_its_accuracy(tmp_path: Path) -> None:
    page = make_page(write_run(tmp_path, "step,train/loss,val/accuracy\n1,3,\n2,2,0.875\n"))
    assert "<dt>val accuracy</dt><dd>0.875" in page
    assert "<b>accuracy</b>" in page


@pytest.mark.parametrize("num_rows", [30_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_rows_of_fifteen_metrics_stay_under_three_megabytes(num_rows: int, tmp_path: Path) -> None:
    names = ["train/loss", *(f"grad/norm/blocks.{i}" for i in range(14))]
    lines = [f"step,{','.join(names)}"]
    for step in range(1, num_rows + 1):
        values = [f"{2 + ((step * 7919 + i * 104_729) % 10_007) / 10_007:.7f}" for i in range(15)]
        if step == 26_803:
            values[0] = "97.5"
        if step == 21_415:
            values[0] = "nan"
        lines.append(f"{step},{','.join(values)}")
    page = make_page(write_run(tmp_path, "\n".join(lines) + "\n"))
    assert len(page) < 3_000_000
    points = get_points(page, "train/loss")
    assert len(points) > 8_000  # denser than any screen is wide
    assert (26_803, 97.5) in points
    assert (21_415, None) in points
    assert f"train/loss: 1 of {num_rows:,} not finite, first at step 21,415" in page


def test_the_plan_is_shown_next_to_what_was_measured(tmp_path: Path) -> None:
    rows = "step,train/loss,train/samples,time/step_seconds\n1,3,16,0.5\n2,3,32,0.25\n3,3,48,0.5\n"
    folder = write_run(
        tmp_path,
        rows,
        config="global_batch_size: 16\nseq_len: 128\ntrainer:\n  max_steps: 4\n",
        summary={"steps": 3, "samples": 48, "tokens": 6144, "seconds": 90.0},
    )
    plan = {"step_seconds": 0.4, "seconds": 60, "peak_memory_gib": 2.0, "why": "a guess"}
    (folder / "plan.json").write_text(json.dumps(plan))
    run = read_run(folder)
    planned, measured = planned_values(run), measured_values(run)
    both = {name: (value, measured[name]) for name, value in planned.items() if name in measured}
    assert both == {
        "steps": (4, 3),
        "samples": (64, 48),
        "tokens": (8192, 6144),
        "global_batch_size": (16, 16.0),
        "step_seconds": (0.4, 0.5),
        "seconds": (60, 90.0),
    }
    page = make_page(folder)
    assert "<tr><td>seconds per step</td><td>0.4 s</td><td>0.5 s</td><td>125.0%</td></tr>" in page
    assert "<tr><td>time</td><td>1:00</td><td>1:30</td><td>150.0%</td></tr>" in page


def test_of_loaders_of_ones_own_the_plan_knows_the_steps_alone(tmp_path: Path) -> None:
    config = "global_batch_size: 16\ndata:\n  module:\n    _target_: my.Rows\ntrainer:\n  max_steps: 4\n"
    folder = write_run(tmp_path, "step,train/loss\n4,3\n", config=config, summary={"steps": 4, "samples": 256})
    assert planned_values(read_run(folder)) == {"steps": 4}


def test_without_a_config_and_a_plan_there_is_no_plan_table(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "step,train/loss\n1,3\n", summary={"steps": 1})
    assert get_plan(read_run(folder)) == []


def test_typed_overrides_are_marked_in_the_config_and_display_settings_are_hidden(
    tmp_path: Path,
) -> None:
    config = (
        "seed: 3\noptimizer:\n  _target_: recipes.optimizer.sgd.sgd\n  lr: 0.5\n  momentum: 0.9\n"
        "dashboard:\n  sections: []\ncallbacks:\n  report:\n    dashboard: []\n    _target_: x\n"
    )
    typed = ["optimizer=sgd", "+optimizer.lr=0.5", "~callbacks.sample_text"]
    page = make_page(write_run(tmp_path, "step,train/loss\n1,3\n", config=config, environment={"overrides": typed}))
    assert "<mark>optimizer:</mark>\n  _target_: recipes" in page
    assert "<mark>  lr: 0.5</mark>\n  momentum: 0.9" in page
    assert "Config (2 typed lines)" in page
    assert "sections" not in page.partition('<pre class="config">')[2].partition("</pre>")[0]
    assert '<code class="typed">~callbacks.sample_text</code>' in page


def test_a_config_that_cannot_be_parsed_is_shown_as_text(tmp_path: Path) -> None:
    config = "name: x\nloss: !!python/object:some.Loss {}\n"
    assert config in make_page(write_run(tmp_path, "step,train/loss\n1,3\n", config=config))


def test_a_spike_dump_is_listed_with_the_command_that_recomputes_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "spikes" / "step_0000021"
    folder.mkdir(parents=True)
    alarms = {
        "norm": {"kind": "non_finite", "score": None},
        "loss": {"kind": "high", "score": 12.5},
    }
    spike = {"step": 21, "loss": 9.5, "grad_norm": None, "skipped": True, "alarms": alarms}
    (folder / "spike.json").write_text(json.dumps(spike))
    assert "mode=replay" not in make_page(write_run(tmp_path, "step,train/loss\n1,3\n"))  # of somebody's own program
    config = "mode:\n  _target_: recipes.mode.fit.fit\n"
    page = make_page(write_run(tmp_path, "step,train/loss\n1,3\n", config=config))
    assert '<a href="spikes/step_0000021">' in page
    assert "norm non finite; loss high, score 12.5" in page
    assert "<td>9.5</td><td>not finite</td><td>skipped</td>" in page
    assert f"python train.py mode=replay resume={tmp_path} mode.step=21" in page
    environment = {"program": "PYTHONPATH=code python train.py", "classes": ["++model._target_=net.Net"]}
    recorded = write_run(tmp_path, "step,train/loss\n1,3\n", config=config, environment=environment)
    typed = "PYTHONPATH=code python train.py mode=replay"
    assert f"{typed} resume={tmp_path} ++model._target_=net.Net mode.step=21" in make_page(recorded)
    (folder / "spike.json").write_text(json.dumps(spike | {"step": "1; touch x"}))
    page = make_page(write_run(tmp_path, "step,train/loss\n1,3\n", config=config))
    assert escape("'mode.step=1; touch x'") in page  # a command to copy is one command


def test_the_operators_that_took_longest_come_first(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    rows = [
        {"name": "aten::add", "calls": 9000, "self_seconds": 0.5, "share": 0.2},
        {"name": "aten::mm", "calls": 1200, "self_seconds": 1.5, "share": 0.6},
        {"name": "incomplete"},
    ]
    (tmp_path / "profile" / "operators.json").write_text(json.dumps(rows))
    page = make_page(write_run(tmp_path, "step,train/loss\n1,3\n"))
    assert page.index("aten::mm") < page.index("aten::add")
    assert "<td>1,200</td><td>1.5</td>" in page
    assert "incomplete" not in page


def test_a_diagnosis_stands_above_the_curves(tmp_path: Path) -> None:
    events = [{"step": 40, "event": "diagnosis", "text": "the loader holds the GPU up"}]
    page = make_page(write_run(tmp_path, "step,train/loss\n1,3\n", events=events))
    assert page.index("the loader holds the GPU up") < page.index('<figure class="chart')


def test_only_the_panels_of_a_dashboard_are_drawn_and_other_metrics_are_listed(
    tmp_path: Path,
) -> None:
    panels = [{"title": "my loss", "metrics": ["train/loss"], "picture": True}]
    folder = write_run(tmp_path, "step,train/loss,lr\n1,3,0.1\n2,3,0.1\n")
    write_report(folder, [{"title": "mine", "panels": panels}])
    page = (folder / "report.html").read_text()
    assert [chart["title"] for chart in get_data(page)["charts"]] == ["my loss"]
    assert "Not in any panel of the dashboard: lr</p>" in page


def test_events_are_counted_by_kind_and_rolled_back_steps_are_a_band(tmp_path: Path) -> None:
    events = [
        {"step": 9, "event": "spike"},
        {"step": 8, "event": "spike"},
        {"step": 4, "event": "rollback", "from": 9},
    ]
    page = make_page(write_run(tmp_path, "step,train/loss\n0,3\n10,3\n", events=events))
    assert ">spike &times; 2</button>" in page
    assert ">rollback &times; 1</button>" in page
    assert [4, "rollback", 9] in get_data(page)["marks"]


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
def test_the_status_of_a_run(tmp_path: Path, files: dict[str, Any], status: str | None) -> None:
    assert get_status(read_run(write_run(tmp_path, "step,a\n1,1\n", **files))) == status


def test_a_fit_of_any_module_writes_picture_and_page(plain_module, make_trainer, tmp_path) -> None:
    make_trainer(callbacks=[RunReport()], limit_val_batches=1).fit(plain_module())
    page = (tmp_path / "run" / "report.html").read_text()
    assert "train_loss" in page
    assert "val_loss" in page
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000


def test_a_run_that_fails_has_a_page_and_raises_its_own_error(plain_module, make_trainer, tmp_path) -> None:
    class Failing(plain_module):  # type: ignore[misc, valid-type]
        def on_train_batch_end(self, *args: Any) -> None:
            if self.trainer.global_step == 3:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer(callbacks=[RunReport()]).fit(Failing())
    assert "train_loss" in (tmp_path / "run" / "report.html").read_text()


def test_a_report_that_cannot_be_written_does_not_fail_the_run(
    plain_module, make_trainer, tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run" / "report.html").mkdir(parents=True)  # where the page should go
    make_trainer(callbacks=[RunReport()], max_steps=2).fit(plain_module())
    assert caplog.messages == [f"{tmp_path}/run/report.html could not be written: Is a directory. The run goes on"]


def test_a_run_that_logs_nothing_has_no_report_and_says_so(
    plain_module, make_trainer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Silent(plain_module):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).square().mean()

    caplog.set_level("INFO", logger="lightning_recipes")
    make_trainer(callbacks=[RunReport()], max_steps=1, logger=False).fit(Silent())
    assert "no report: nothing was logged" in caplog.text
    assert not (tmp_path / "report.html").exists()


class NoFolder(Logger):
    """A logger like those of online services: it has no folder."""

    name, version = "service", "1"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize("which", ["none", "CSV", "TensorBoard", "a service", "a service and CSV"])
def test_the_rows_of_a_report_are_those_of_the_run_whatever_its_loggers(
    plain_module, make_trainer, tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    csv = CSVLogger(tmp_path, name="", version="run")
    loggers: dict[str, tuple[Any, Path]] = {
        "none": (False, tmp_path),
        "CSV": (csv, tmp_path / "run"),
        "TensorBoard": (TensorBoardLogger(tmp_path, name="", version="board"), tmp_path / "board"),
        "a service": (NoFolder(), tmp_path),
        "a service and CSV": ([NoFolder(), csv], tmp_path / "run"),
    }
    logger, folder = loggers[which]
    runs = []
    monkeypatch.setattr("callbacks.report.page.get_groups", lambda run, sections: runs.append(run) or [])
    trainer = make_trainer(
        callbacks=[RunReport()], max_epochs=2, limit_val_batches=1, log_every_n_steps=5, logger=logger
    )
    trainer.fit(plain_module())
    [run] = runs
    assert (folder / "report.html").exists()
    assert [step for step, _ in run.series["train_loss"]] == [5, 10, 15]
    assert [step for step, _ in run.series["val_loss"]] == [8, 16]
    assert run.last_step == trainer.global_step == 16
    assert "log_metrics" not in vars(trainer._logger_connector)  # Lightning's own again


def test_the_callback_has_no_state_to_restore() -> None:
    assert RunReport().state_dict() == {}


def test_a_folder_may_be_text(tmp_path: Path) -> None:
    written = write_run(tmp_path, "step,train/loss\n1,3.0\n2,2.0\n")
    for write in (write_report, RunReport().write_report):
        write(str(written))
        assert (written / "report.html").is_file()
        (written / "report.html").unlink()


def test_the_findings_stand_near_the_top_escaped_and_a_healthy_run_has_one_line(tmp_path: Path) -> None:
    rates = "".join(f"{step},{4 - 0.01 * step},{0 if step > 60 else 0.1}\n" for step in range(1, 121))
    config = "mode: {_target_: x}\ntrainer: {max_steps: 120}\n"
    page = make_page(write_run(tmp_path, "step,train/loss,lr\n" + rates, config=config))
    assert page.index("<b>decayed too early</b>") < page.index('<dl class="tiles">')
    assert "<li>lr 0 at steps 61 to 120</li>" in page
    assert "<code>scheduler.num_steps=120</code>" in page
    falling = "".join(f"{step},{4 - 0.01 * step},0.1\n" for step in range(1, 121))
    page = make_page(write_run(tmp_path, "step,train/loss,lr\n" + falling, config=config))
    assert "No finding among" in page
    assert 'id="findings"' not in page
    evil = "step,train/loss,lr-<script>alert(1)</script>\n" + rates
    page = make_page(write_run(tmp_path, evil, config=config))
    assert "lr-&lt;script&gt;alert(1)&lt;/script&gt; 0 at steps 61 to 120" in page
    balance = Balance()
    balance.feed(page)
    assert balance.open == []


def test_a_fit_that_is_refused_before_it_trains_leaves_the_page_of_the_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/loss\n1,2.0\n")
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), is_global_zero=True, loggers=[], callbacks=[], default_root_dir=tmp_path
    )
    module: Any = SimpleNamespace(recipes_row={})
    callback = RunReport()
    callback.on_exception(trainer, module, ValueError("resume=…: it is of another model"))
    assert not (tmp_path / "report.html").exists()
    callback.on_train_start(trainer, module)
    callback.on_exception(trainer, module, ValueError("crashed"))
    assert (tmp_path / "report.html").exists()
