"""The comparison page: no run is dropped, the best is first, dependent parameters are listed once."""

import json
import random
import re
from html import unescape
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from callbacks.report.compare.page import get_axis, write_comparison
from callbacks.report.compare.values import differing_parameters, find_best, get_value
from callbacks.report.run_record import read_run

ROOT = Path(__file__).parents[4]
DASHBOARD = yaml.safe_load((ROOT / "conf" / "dashboard" / "default.yaml").read_text())["sections"]
DASH = "\N{EN DASH}"
EVIL = "</script><script>alert(1)</script>&\"'"


def write_run(folder: Path, *, losses: list[float], config: dict[str, Any], **summary: Any) -> Path:
    """Write a run folder with a validation loss in each row, and a summary if any of its values is given."""
    folder.mkdir(parents=True)
    rows = "".join(f"{10 * (i + 1)},{loss},{loss}\n" for i, loss in enumerate(losses))
    if losses:
        (folder / "metrics.csv").write_text(f"step,train/loss,val/loss\n{rows}")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "events.jsonl").write_text('{"step": 0, "event": "start"}\n')
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def make_config(lr: float, **more: Any) -> dict[str, Any]:
    return {"name": "x", "optimizer": {"_target_": "a.b.adamw", "lr": lr}, **more}


def make_page(folders: list[Path], path: Path, **arguments: Any) -> str:
    """Write the comparison of runs and return its page."""
    write_comparison(folders, path, **arguments)
    return path.read_text()


LEVELS = "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.yaml", f"a0: &a0 [x]\n{LEVELS}"),  # billions of values
        ("config.yaml", "a: &a [*a]\n"),
        ("config.yaml", DEEP),
        ("summary.json", DEEP),
        (
            "summary.json",
            json.dumps({"val_loss": 10**400, "status": "\ud800", "evaluations": {"val": {"loss": 10**400}}}),
        ),
        ("events.jsonl", f"{DEEP}\n3\nnull\n"),
        ("metrics.csv", "step,train/loss\ninf,1\nnan,2\n1e400,3\nx,4\n10,5\n"),
    ],
)
def test_a_run_with_hostile_files_is_compared_with_the_others(file: str, content: str, tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", losses=[2.0, 1.5], config=make_config(0.1), val_loss=1.5)
    hostile = write_run(tmp_path / "hostile", losses=[2.5], config=make_config(0.2), val_loss=2.5)
    (hostile / file).write_text(content)
    page = make_page([hostile, good], tmp_path / "report.html")
    assert [run["text"].partition(" ")[0] for run in get_data(page)["runs"]] == ["good", "hostile"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00\x80" * 200, "is not a text file"),
        (b"place,train/loss\n1,2.0\n", "has no column 'step' in its header ['place', 'train/loss']"),
        (b"step,train/loss\n1,2.0\n2," + b"9" * 200_000 + b"\n", "line 3: field larger than field limit"),
        (b"step,train/loss\n\x002,1\nx,2\n\x00\n", "3 of its 3 rows are cut or have no step"),
    ],
    ids=["empty", "binary", "no-step", "huge-cell", "no-rows"],
)
def test_a_run_whose_metrics_cannot_be_read_is_named_and_the_others_are_compared(
    content: bytes, reason: str, three: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = three[0] / "metrics.csv"
    metrics.write_bytes(content)
    data = get_data(make_page(three, tmp_path / "page.html"))
    assert len(data["runs"]) == 3
    [line] = caplog.messages
    assert str(metrics) in line
    assert reason in line


def get_data(page: str) -> dict[str, Any]:
    """Return what the page's script draws from."""
    data = re.search(r'id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert data is not None
    value: dict[str, Any] = json.loads(data.group(1))
    return value


class Table(HTMLParser):
    """The cells of the first table, as text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._inside = False
        self.feed(page.partition('<table class="figures">')[2].partition("</table>")[0])

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.rows[-1][-1] += data


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Write three runs: the best is last by name; one failed, one still runs."""
    return [
        write_run(tmp_path / "0", losses=[5.0, 4.0], config=make_config(0.1), status="failed", val_loss=4.0),
        write_run(tmp_path / "1", losses=[5.0, 4.5], config=make_config(0.01)),
        write_run(
            tmp_path / "10", losses=[5.0, 3.0, 3.5], config=make_config(0.001),
            status="finished", val_loss=3.5, best_val_loss=3.0, mfu=0.25,
        ),
    ]  # fmt: skip


def test_the_table_lists_every_run_with_its_status_best_first(three, tmp_path: Path) -> None:
    head, *rows = Table(make_page(three, tmp_path / "report.html", dashboard=DASHBOARD)).rows
    assert head[:4] == ["run", "status", "val loss", "lr"]
    assert [row[:4] for row in rows] == [
        ["10", "finished", "3.5", "0.001"],
        ["0", "failed", "4", "0.1"],
        ["1", "running", "4.5", "0.01"],
    ]


def test_the_shortest_time_is_that_of_a_finished_run(tmp_path: Path) -> None:
    times = {"a": ("failed", 1.0), "b": ("finished", 30.0), "c": ("finished", 70.0)}
    runs = [
        write_run(tmp_path / name, losses=[2.0], config=make_config(0.1), status=status, seconds=seconds, val_loss=2.0)
        for name, (status, seconds) in times.items()
    ]
    page = make_page(runs, tmp_path / "report.html")
    assert re.findall(r'<span class="best">(.*?)</span>', page) == ["0:30"]


def test_a_run_that_failed_before_its_first_row_is_in_the_table(three, tmp_path: Path) -> None:
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "train.log").write_text("out of memory\n")
    rows = Table(make_page([*three, tmp_path / "2"], tmp_path / "report.html")).rows
    assert rows[-1][:3] == ["2", "did not start", DASH]


def test_a_run_with_an_empty_metrics_file_and_one_of_another_project_are_in_the_table(three, tmp_path: Path) -> None:
    for name, text in (("2", ""), ("3", "step,train_loss\n1,2.5\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(text)
    folders = [*three, tmp_path / "2", tmp_path / "3"]
    rows = Table(make_page(folders, tmp_path / "report.html", sort="train_loss")).rows
    assert rows[1][:3] == ["3", "unknown", "2.5"]
    assert rows[-1][:3] == ["2", "did not start", DASH]


def test_a_measure_of_which_more_is_better_is_sorted_from_high_to_low(three, tmp_path: Path) -> None:
    (three[0] / "summary.json").write_text('{"status": "failed", "mfu": 0.5}')
    rows = Table(make_page(three, tmp_path / "report.html", sort="mfu")).rows
    assert [row[:3] for row in rows] == [
        ["run", "status", "MFU"],
        ["0", "failed", "50.0%"],
        ["10", "finished", "25.0%"],
        ["1", "running", DASH],
    ]


def test_evaluations_are_columns_and_may_be_what_runs_are_sorted_by(tmp_path: Path) -> None:
    evaluated = [
        {"hellaswag": {"checkpoint": "step_0000010.ckpt", "weights": "trained", "acc_norm": value, "acc": None}}
        for value in (0.25, 0.5)
    ]
    evaluated[0]["val"] = {"checkpoint": "step_0000010.ckpt", "weights": "trained", "loss": 3.75}
    runs = [
        write_run(tmp_path / str(i), losses=[4.0], config=make_config(0.1), val_loss=4.0 - i, evaluations=evaluations)
        for i, evaluations in enumerate([*evaluated, "damaged"])
    ]
    page = make_page(runs, tmp_path / "page.html", sort="hellaswag/acc_norm")
    heads, *rows = Table(page).rows
    assert heads[2] == "hellaswag/acc_norm"
    assert [row[2] for row in rows] == ["0.5", "0.25", DASH]
    column = heads.index("evaluate_val/loss")
    assert sorted(row[column] for row in rows) == ["3.75", DASH, DASH]
    assert "hellaswag/acc" not in heads
    assert [row[heads.index("val loss")] for row in rows] == ["3", "4", "2"]  # of the training run, as before


def test_sorting_by_what_no_run_has_is_an_error_that_lists_what_they_have(three, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="no run has it; they have best_val_loss, mfu, steps"):
        write_comparison(three, tmp_path / "report.html", sort="val_accurracy")


def test_the_curves_of_all_runs_share_a_chart_and_keep_every_spike(tmp_path: Path) -> None:
    random.seed(0)
    folders = []
    for i in range(3):
        losses = [2 + random.random() for _ in range(5000)]
        losses[4321] = 90.0 + i
        folders.append(write_run(tmp_path / str(i), losses=losses, config=make_config(0.1 * i)))
    chart = get_data(make_page(folders, tmp_path / "report.html", dashboard=DASHBOARD))["charts"][0]
    for curve in chart["curves"]:
        points = list(zip(accumulate(curve["steps"]), curve["values"], strict=True))
        assert (43_220, 90.0 + int(curve["name"])) in points
    assert {curve["run"] for curve in chart["curves"]} == {0, 1, 2}


def test_three_hundred_runs_of_fifteen_metrics_stay_under_three_megabytes(tmp_path: Path) -> None:
    names = [m for section in DASHBOARD for panel in section["panels"] for m in panel["metrics"]]
    names = [name for name in dict.fromkeys(names) if "*" not in name][:15]
    random.seed(0)
    rows = [[f"{random.random():.7f}" for _ in names] for _ in range(500)]
    folders = []
    for i in range(300):
        folder = write_run(tmp_path / str(i), losses=[], config=make_config(random.random(), seed=i))
        text = "".join(f"{s},{','.join(rows[(s * 7 + i) % 500])}\n" for s in range(1, 501))
        (folder / "metrics.csv").write_text(f"step,{','.join(names)}\n{text}")
        folders.append(folder)
    page = make_page(folders, tmp_path / "report.html", dashboard=DASHBOARD)
    assert len(page) < 3_000_000
    assert len(Table(page).rows) == 301
    data = get_data(page)
    assert [chart["kind"] for chart in data["charts"]] == ["steps"] * 15 + ["parallel"]
    assert min(len(curve["steps"]) for curve in data["charts"][0]["curves"]) > 30


def test_a_parameter_that_follows_from_another_is_omitted(
    tmp_path: Path,
) -> None:
    folders = []
    for i, steps in enumerate((100, 200)):
        config = {
            "scheduler": {"num_steps": steps},
            "trainer": {"max_steps": steps},
            "optimizer": {
                "_target_": f"recipes.optimizer.{['adamw', 'sgd'][i]}.make",
                "lr": 0.1,
            },
            "seed": 3 + i % 1,
            "name": f"run {i}",
            "dashboard": {"sections": [i]},
        }
        folders.append(write_run(tmp_path / str(i), losses=[3.0], config=config))
        environment = {"overrides": [f"trainer.max_steps={steps}"]}
        (folders[-1] / "environment.json").write_text(json.dumps(environment))
    assert differing_parameters([read_run(folder) for folder in folders]) == {"trainer.max_steps": [100, 200]}
    config = yaml.safe_load((folders[1] / "config.yaml").read_text())
    config["optimizer"]["_target_"] = "recipes.optimizer.sgd.sgd"
    (folders[1] / "config.yaml").write_text(yaml.safe_dump(config | {"compile": None}))
    runs = [read_run(folder) for folder in folders]
    assert differing_parameters(runs, ["optimizer"]) == {
        "optimizer": ["make", "sgd"],
        "trainer.max_steps": [100, 200],
        "compile": [None, "null"],
    }


def test_two_typed_parameters_with_equal_values_are_both_listed(
    tmp_path: Path,
) -> None:
    folders = []
    for number in (100, 200):
        config = {
            "warmup_steps": number,
            "eval_every": number,
            "scheduler": {"warmup_steps": number},
        }
        folders.append(write_run(tmp_path / str(number), losses=[3.0], config=config))
        typed = {"overrides": [f"warmup_steps={number}", f"eval_every={number}"]}
        (folders[-1] / "environment.json").write_text(json.dumps(typed))
    values = [100, 200]
    runs = [read_run(folder) for folder in folders]
    assert differing_parameters(runs) == {"warmup_steps": values, "eval_every": values}


def test_runs_with_equal_configs_have_no_parallel_panel(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, losses=[3.0], config=make_config(0.1)) for name in "ab"]
    page = make_page(folders, tmp_path / "report.html", dashboard=DASHBOARD)
    assert 'class="chart parallel' not in page
    assert 'class="chart bars' in page


@pytest.mark.parametrize(
    ("bests", "widths", "start"),
    [([1.0, 4.0], [25.0, 100.0], ""), ([2.0, 2.08], [20.0, 100.0], ", from 1.98"), ([3.0, 3.0], [100.0, 100.0], "")],
)
def test_bars_of_close_values_start_below_the_lowest(
    bests: list[float], widths: list[float], start: str, tmp_path: Path
) -> None:
    folders = [write_run(tmp_path / f"run{i}", losses=[best], config=make_config(i)) for i, best in enumerate(bests)]
    page = make_page(folders, tmp_path / "report.html", dashboard=DASHBOARD)
    assert [float(width) for width in re.findall(r'<i style="width:([\d.]+)%">', page)] == pytest.approx(widths)
    assert f'<span class="note">val/loss{start}</span>' in page


def test_charts_of_one_panel_are_titled_by_their_metrics(three: Any, tmp_path: Path) -> None:
    dashboard = [{"title": "learning", "panels": [{"title": "loss", "metrics": ["train/loss", "val/loss"]}]}]
    page = make_page(three, tmp_path / "report.html", dashboard=dashboard)
    titles = re.findall(r"<figcaption><b>([^<]*)</b><span class=\"note\">([^<]*)</span>", page)
    assert titles == [("train/loss", "loss"), ("val/loss", "loss")]


def test_an_axis_over_decades_is_logarithmic_and_its_middle_is_the_geometric_mean() -> None:
    axis = get_axis("lr", [0.001, 0.01, 0.1])
    assert axis.title == "lr (log)"
    assert axis.positions == pytest.approx([0, 0.5, 1])
    assert [label for _, label in axis.ticks] == ["0.001", "0.01", "0.1"]


def test_an_axis_of_texts_is_even_and_runs_without_a_value_are_at_its_bottom() -> None:
    axis = get_axis("optimizer", ["adamw", None, "sgd", "adamw"])
    assert axis.positions == [0.16, 0.0, 1.0, 0.16]
    assert axis.ticks == [(0.0, "none"), (0.16, "adamw"), (1.0, "sgd")]


def test_an_axis_of_many_numbers_has_a_few_round_ticks() -> None:
    axis = get_axis("seed", list(range(0, 1000, 10)))
    assert [label for _, label in axis.ticks] == ["0", "200", "400", "600", "800"]


def test_the_best_of_a_run_is_its_lowest_loss_and_its_highest_accuracy() -> None:
    values = [3.0, float("nan"), 2.0, 2.5]
    assert (find_best(values, "val/loss"), find_best(values, "val/accuracy")) == (2.0, 3.0)
    assert find_best([float("nan")], "val/loss") is None


def test_a_run_without_a_summary_has_the_values_of_its_last_row(three) -> None:
    run = read_run(three[1])
    values = [get_value(run, name) for name in ("val_loss", "best_val_loss", "train/loss", "steps", "mfu")]
    assert values == [4.5, 4.5, 4.5, 20, None]


def test_text_from_runs_is_escaped(tmp_path: Path) -> None:
    config = {EVIL: EVIL, "optimizer": {"lr": 1}}
    folders = [
        write_run(tmp_path / "a", losses=[3.0], config=config, status=EVIL),
        write_run(tmp_path / "b <i>", losses=[2.0], config={EVIL: 1, "optimizer": {"lr": 2}}),
    ]
    (folders[0] / "metrics.csv").write_text(f'step,"{EVIL.replace(chr(34), chr(34) * 2)}"\n1,2\n')
    page = make_page(folders, tmp_path / "report.html")
    assert page.count("<script") == 2
    assert "<script>alert" not in page
    assert "<i>" not in re.sub(r"<i><i style[^>]*></i></i>", "", page)
    without = page.replace("https://github.com/leeoniya/uPlot", "")  # in a comment
    assert re.findall(r"https?://|\bsrc=|@import|url\(|fetch\(", without) == []


def test_a_run_links_to_its_own_page_by_a_relative_path(three, tmp_path: Path) -> None:
    (three[0] / "report.html").write_text("")
    page = make_page(three, tmp_path / "out" / "all.html")
    assert re.findall(r'href="(\.[^"]*)"', page) == ["../0/report.html"]


@pytest.mark.parametrize("name", ["javascript:alert(1)", "data:text,x", "a#b", "a?b", "50%", "%2e%2e", "é ü", '"x'])
def test_the_link_to_a_run_leads_to_its_page_whatever_the_folder_is_called(name: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / name, losses=[2.0], config={})
    (run / "report.html").write_text("")
    page = make_page([run], tmp_path / "all.html")
    [link] = [text for text in re.findall(r'href="([^"]*)"', page) if text.endswith("report.html")]
    parts = urlsplit(unescape(link))
    assert (parts.scheme, parts.netloc, parts.query, parts.fragment) == ("", "", "", "")
    assert unquote(parts.path) == f"{name}/report.html"


def test_a_single_run_and_runs_without_a_row_have_a_page(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, losses=[], config={}) for name in "ab"]
    assert "<h1>2 runs</h1>" in make_page(folders, tmp_path / "x.html", dashboard=DASHBOARD)
    assert "<h1>1 run</h1>" in make_page(folders[:1], tmp_path / "y.html")
    with pytest.raises(ValueError, match="no run"):
        write_comparison([], tmp_path / "z.html")


def test_paths_may_be_text_and_one_path_is_no_list_of_them(three: list[Path], tmp_path: Path) -> None:
    write_comparison([str(folder) for folder in three], str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").exists()
    with pytest.raises(ValueError, match="give a list of paths"):
        write_comparison(str(three[0]), tmp_path / "page.html")
