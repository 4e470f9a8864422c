"""Both pages in a real browser: an empty console, the right values at the pointer, zoom in and out again."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import PROGRAM, Tab

from callbacks.report.compare.page import write_comparison
from callbacks.report.mode_pages import write_plan_page, write_preflight_page, write_trial_page
from callbacks.report.page import write_report

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")
ROOT = Path(__file__).parents[3]
DASHBOARD = yaml.safe_load((ROOT / "conf" / "dashboard" / "default.yaml").read_text())["sections"]
SCREENS = [(1280, False), (1280, True), (390, False), (390, True)]
LAST = 1000


def write_run(folder: Path, number: int = 0) -> Path:
    """Write a run of a thousand steps: the loss is 10 - step / 200, with one spike, one NaN and one rollback."""
    folder.mkdir(parents=True)
    rows = []
    for step in range(1, LAST + 1):
        loss = {400: "77", 700: "nan"}.get(step, f"{10 + number - step / 200}")
        val = f"{9 + number - step / 250}" if step % 100 == 0 else ""
        rows.append(f"{step},{loss},{val},{step / 1e6},{1 + step % 3},5000,{16 * step}")
    names = "train/loss,val/loss,lr,grad/norm,throughput/tokens_per_second,train/samples"
    (folder / "metrics.csv").write_text(f"step,{names}\n" + "\n".join(rows) + "\n")
    events = [
        {"step": 400, "event": "spike"},
        {"step": 300, "event": "rollback", "from": 400},
        {"step": 1, "event": "diagnosis", "text": "the loader is slow " * 9},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    config = {"optimizer": {"lr": 0.1**number, "decay": number}, "trainer": {"max_steps": LAST}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {
        "overrides": [f"optimizer.decay={number}", "a_long_word=" + "x" * 90],
        "program": "PYTHONPATH=" + ":/home/me/a_folder" * 20 + " python train.py",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    summary = {"status": "finished", "steps": LAST, "val_loss": 5.0 + number, "tokens": 10**9}
    (folder / "summary.json").write_text(json.dumps(summary))
    operators = [{"name": "aten::" + "mm" * 40, "calls": 9, "self_seconds": 1.0, "share": 0.5}]
    known = {"question": "which of these words is first?", "expected": "the second one", "rejected": "neither of both"}
    answers = [{"step": step, "given": f"an answer at {step}", "score": 0.0, **known} for step in (0, LAST)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    (folder / "profile").mkdir()
    (folder / "profile" / "operators.json").write_text(json.dumps(operators))
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "one")
    write_report(folder, DASHBOARD)
    return folder / "report.html"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("sweep")
    folders = [write_run(parent / f"run_{i}", i) for i in range(3)]
    write_comparison(folders, parent / "report.html", dashboard=DASHBOARD)
    return parent / "report.html"


def get_box(tab: Tab, selector: str) -> dict[str, float]:
    """Scroll to an element and return its box in the window, in pixels."""
    find = f"document.querySelector({json.dumps(selector)})"
    tab.value(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    tab.settle()
    box: dict[str, float] = tab.value(f"{find}.getBoundingClientRect().toJSON()")
    return box


def point(tab: Tab, step: float, *, chart: int = 0) -> tuple[float, float]:
    """Return the point of a chart at a step, halfway up."""
    box = get_box(tab, f'[data-chart="{chart}"] .u-over')
    return box["x"] + step / LAST * box["width"], box["y"] + box["height"] / 2


def readout(tab: Tab, *, chart: int = 0) -> list[list[str]]:
    """Return the rows of a chart's readout; empty if it is hidden."""
    found: list[list[str]] = tab.value(
        f"""(() => {{
          const box = document.querySelector('[data-chart="{chart}"] .readout');
          const cells = (row) => [...row.children].map((cell) => cell.textContent);
          return box.hidden ? [] : [...box.children].map(cells);
        }})()"""
    )
    return found


def steps_shown(tab: Tab) -> tuple[int, int]:
    text: str = tab.value("document.querySelector('.zoom output').textContent")
    first, last = re.findall(r"\d+", text.replace(",", ""))
    return int(first), int(last)


@pytest.mark.parametrize(("width", "dark"), SCREENS)
@pytest.mark.parametrize("page", ["report", "comparison"])
def test_a_page_fits_the_screen_and_logs_nothing_to_the_console(
    tab: Tab, request: pytest.FixtureRequest, page: str, width: int, dark: bool
) -> None:
    tab.open(request.getfixturevalue(page), width=width, dark=dark)
    assert tab.console == []
    assert tab.value("document.documentElement.scrollWidth") <= width
    ground = tab.value("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(18, 19, 21)" if dark else "rgb(247, 247, 245)")
    assert tab.value("plots.flatMap((plot) => plot.u.series.filter((line, i) => i && line.show)).length") >= 6


def test_the_names_of_checks_break_between_words_on_a_phone(tab: Tab, tmp_path: Path) -> None:
    found = (
        "loss 7.65818 and 7.65818, gradient norm 1.96952 and 1.96952, in 1 and 2 micro-batches of the same 16 samples"
    )
    check = {"check": "a checkpoint restores the loss", "status": "pass", "found": found, "remedy": None}
    write_preflight_page(tmp_path / "page.html", [check], [], about={})
    tab.open(tmp_path / "page.html", width=390)
    assert tab.value("document.documentElement.scrollWidth") <= 390
    assert tab.value("document.querySelector('.checks td:nth-child(2)').clientHeight") < 30, "it fits on one line"


def test_the_columns_of_answers_are_below_each_other_on_a_phone(tab: Tab, report: Path) -> None:
    cells = "[...document.querySelectorAll('.answers td')]"
    for width, num_rows in ((1280, 1), (390, 5)):
        tab.open(report, width=width)
        assert tab.value(f"new Set({cells}.map((cell) => cell.getBoundingClientRect().y)).size") == num_rows
        assert tab.value(f"Math.min(...{cells}.map((cell) => cell.clientWidth))") > 100, "words are on one line"
    shown = tab.value(f"{cells}.map((cell) => getComputedStyle(cell, '::before').content)")
    assert shown == ['"question"', '"answer of the start"', f'"answer at step {LAST}"', '"chosen"', '"rejected"']


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_the_readout_shows_each_curve_at_the_step_nearest_to_the_pointer(
    tab: Tab, report: Path, width: int, dark: bool
) -> None:
    tab.open(report, width=width, dark=dark)
    x, y = point(tab, 501)
    tab.mouse("Moved", x, y)
    tab.settle()
    [head, train, val] = readout(tab)
    step = int(head[1])
    assert abs(step - 501) <= 2 * LAST / width + 1
    assert train == ["train/loss", f"{10 - step / 200:.5g}"]
    assert val == ["val/loss at 500" if step != 500 else "val/loss", "7"]
    tab.mouse("Moved", x, y - 4000)
    tab.settle()
    assert readout(tab) == []
    assert tab.console == []


def test_the_readout_names_the_events_near_the_pointer(tab: Tab, report: Path) -> None:
    tab.open(report, width=1280)
    for step, row in ((400, ["spike", "step 400"]), (300, ["rollback", "from 400 back to 300"])):
        tab.mouse("Moved", *point(tab, step))
        tab.settle()
        assert row in readout(tab)


def test_zooming_in_shows_a_spike_and_a_nan_of_a_single_row(tab: Tab, report: Path) -> None:
    tab.open(report, width=1280)
    for step, value in ((400, "77"), (700, "not finite")):
        tab.drag(point(tab, step - 5)[0], point(tab, step + 5)[0], point(tab, 0)[1])
        box = get_box(tab, '[data-chart="0"] .u-over')
        tab.mouse("Moved", box["x"] + tab.value(f"plots[0].u.valToPos({step}, 'x')"), box["y"] + 20)
        tab.settle()
        assert ["step", str(step)] in readout(tab)
        assert ["train/loss", value] in readout(tab)
        tab.value("document.querySelector('[data-zoom=all]').click()")
        tab.settle()


@pytest.mark.parametrize("page", ["report", "comparison"])
def test_a_drag_zooms_every_chart_and_a_double_click_shows_all_steps(
    tab: Tab, request: pytest.FixtureRequest, page: str
) -> None:
    tab.open(request.getfixturevalue(page), width=1280)
    drawn = "plots.map((plot) => plot.u.ctx.canvas.toDataURL())"
    labels = "plots[1].u.axes[0]._values"
    before = tab.value(drawn)
    assert steps_shown(tab) == (0, 1000)
    x, y = point(tab, 200)
    tab.drag(x, point(tab, 400)[0], y)
    first, last = steps_shown(tab)
    assert abs(first - 200) <= 1
    assert abs(last - 400) <= 1
    assert set(tab.value(labels)) >= {"220", "300", "380"}
    tab.mouse("Moved", *point(tab, 500))  # the middle: step 300
    tab.settle()
    assert readout(tab)[0] == ["step", "300"]
    tab.click(*point(tab, 500), times=2)
    assert steps_shown(tab) == (0, 1000)
    assert tab.value(drawn) == before
    assert tab.console == []


def test_the_y_axis_fits_the_visible_steps(tab: Tab, report: Path) -> None:
    tab.open(report, width=1280)
    limits = "[plots[0].u.scales.y.min, plots[0].u.scales.y.max]"
    assert tab.value(limits)[1] > 77  # the spike
    x, y = point(tab, 800)
    tab.drag(x, point(tab, 1000)[0], y)
    low, high = tab.value(limits)
    assert 4.9 < low < high < 6.1


def test_the_keyboard_alone_moves_the_readout_and_zooms(tab: Tab, report: Path) -> None:
    tab.open(report, width=1280)
    tab.value("document.querySelector('[data-chart=\"0\"] .u-over').focus()")
    for _ in range(3):
        tab.key("ArrowRight")
    assert readout(tab)[0] == ["step", "4"]
    tab.key("+")
    assert steps_shown(tab) != (0, 1000)
    tab.key("Escape")
    assert steps_shown(tab) == (0, 1000)
    reset = "document.querySelector('[data-zoom=all]')"
    tab.value("document.querySelector('[data-zoom=in]').click()")
    tab.settle()
    assert steps_shown(tab) == (250, 750)
    assert tab.value(f"{reset}.tabIndex === 0 && !{reset}.disabled")


def test_two_fingers_zoom_and_a_button_shows_all_steps(tab: Tab, report: Path) -> None:
    tab.open(report, width=390)
    x, y = point(tab, 400)
    to, _ = point(tab, 600)
    tab.touch("Start", (x, y))
    tab.touch("Start", (x, y), (to, y))
    for distance in (10, 20, 30, 40):
        tab.touch("Move", (x - distance, y), (to + distance, y))
    tab.touch("End")
    tab.settle()
    first, last = steps_shown(tab)
    assert 200 < first < 400
    assert 600 < last < 800
    box = get_box(tab, "[data-zoom=all]")
    tab.click(box["x"] + 5, box["y"] + 5)
    assert steps_shown(tab) == (0, 1000)
    assert tab.console == []


def test_the_readout_of_a_tap_stays_until_the_next_tap_elsewhere(tab: Tab, report: Path) -> None:
    tab.open(report, width=390)
    for chart, step in ((0, 300), (1, 800)):  # two taps at one place would be a double tap
        tab.touch("Start", point(tab, step, chart=chart))
        tab.touch("End")
        tab.settle()
        assert len(readout(tab, chart=chart)) >= 2
        assert readout(tab, chart=1 - chart) == []
    box = get_box(tab, "h1")
    tab.touch("Start", (box["x"] + 5, box["y"] + 5))
    tab.touch("End")
    tab.settle()
    assert readout(tab, chart=1) == []


def test_a_click_in_the_legend_hides_a_kind_of_event(tab: Tab, report: Path) -> None:
    tab.open(report, width=1280)
    drawn = "plots[0].u.ctx.canvas.toDataURL()"
    before = tab.value(drawn)
    tab.value("document.querySelector('[data-event=spike]').click()")
    tab.settle()
    assert tab.value(drawn) != before
    tab.mouse("Moved", *point(tab, 400))
    tab.settle()
    assert ["spike", "step 400"] not in readout(tab)


def runs_in_table(tab: Tab) -> list[str]:
    """Return the names of the runs, from top to bottom."""
    found: list[str] = tab.value(
        "[...document.querySelectorAll('.runs tbody tr')].map((row) => row.cells[0].textContent)"
    )
    return found


def test_a_click_on_a_heading_sorts_the_runs_and_a_second_reverses_them(tab: Tab, comparison: Path) -> None:
    tab.open(comparison, width=1280)
    assert runs_in_table(tab) == ["run_0", "run_1", "run_2"]
    heading = "[...document.querySelectorAll('.runs th button')].find((head) => head.textContent === 'lr')"
    tab.value(f"{heading}.click()")
    assert runs_in_table(tab) == ["run_2", "run_1", "run_0"]
    tab.value(f"{heading}.click()")
    assert runs_in_table(tab) == ["run_0", "run_1", "run_2"]
    assert tab.console == []


def test_the_readout_lists_every_run_that_is_not_hidden(tab: Tab, comparison: Path) -> None:
    tab.open(comparison, width=1280)
    tab.mouse("Moved", *point(tab, 500))
    tab.settle()
    shown = readout(tab)
    step = int(shown[0][1])
    assert shown[1:] == [[f"run_{i}", f"{10 + i - step / 200:.5g}"] for i in (2, 1, 0)]
    tab.value("document.querySelector('.keys [data-toggle=\"1\"]').click()")
    tab.settle()
    tab.mouse("Moved", *point(tab, 502))
    tab.settle()
    assert [name for name, _ in readout(tab)] == ["step", "run_2", "run_0"]
    shown = "plots[0].lines.filter((line, i) => plots[0].u.series[i + 1].show).map((line) => line.curve.run)"
    assert tab.value(shown) == [2, 0]
    assert tab.console == []


def test_pointing_at_a_run_highlights_it_on_the_whole_page(tab: Tab, comparison: Path) -> None:
    tab.open(comparison, width=1280)
    box = get_box(tab, ".bar-row[data-run='2'] b")
    tab.mouse("Moved", box["x"] + 3, box["y"] + 3)
    tab.settle()
    find = "plots.flatMap((plot) => plot.lines.map((line, i) => [line.curve.run, plot.u.series[i + 1].alpha]))"
    alphas = {(run, alpha) for run, alpha in tab.value(find)}
    assert alphas == {(0, 0.13), (1, 0.13), (2, 1)}
    text: Any = tab.value("document.querySelector('.run-text').textContent")
    assert text == "run_2 · val loss 7 · lr 0.01 · decay 2"
    box = get_box(tab, ".parallel .u-over")
    find = "plots.find((plot) => plot.kind === 'parallel')"
    place = f"{find}.u.valToPos({find}.curves[1].values[0], 'y')"
    tab.mouse("Moved", box["x"] + 1, box["y"] + tab.value(place))
    tab.settle()
    assert tab.value("document.querySelector('.run-text').textContent").startswith("run_1 ")


PLAN = {"usable_gib": 5.0, "timeline": {"gib": {"a": [1, 2, 2], "b": [0.5, 1, 3]}, "sections": ["x, 1", "x, 2", "y"]}}


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_the_memory_of_a_plan_is_stacked_and_read_at_the_pointer(
    tab: Tab, tmp_path: Path, width: int, dark: bool
) -> None:
    write_plan_page(tmp_path / "page.html", PLAN, ["printed " * 30], about={})
    tab.open(tmp_path / "page.html", width=width, dark=dark)
    assert tab.value("plots[0].u.data.slice(1)") == [[1.5, 3, 5, 5], [1, 2, 2, 2], [5, None, None, 5]]
    box = get_box(tab, ".u-over")
    tab.mouse("Moved", box["x"] + box["width"] / 2, box["y"] + 20)
    tab.settle()
    assert readout(tab) == [["x, 2", "3"], ["b", "1"], ["a", "2"]]
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.console == []


@pytest.mark.parametrize("log", [False, True])
def test_a_range_test_is_read_at_the_pointer(tab: Tab, tmp_path: Path, log: bool) -> None:
    points = [(10.0**-i, 1.0 + i) for i in range(5)]
    figure = {"title": "loss", "lines": {"loss": points}, "marks": {"lowest": 0.01}, "log_x": log, "log_y": log}
    write_trial_page(tmp_path / "page.html", "Range test", ["found"], [figure], about={})
    tab.open(tmp_path / "page.html", width=1280)
    box = get_box(tab, ".u-over")
    middle = 0.5 if log else 0.01 / (1 - 1e-4)
    tab.mouse("Moved", box["x"] + middle * box["width"], box["y"] + 20)
    tab.settle()
    assert readout(tab) == [["at", "0.01"], ["loss", "3"]]
    assert tab.console == []


HOSTILE = {
    "one point": "step,loss\n7,3\n",
    "nothing finite": "step,loss\n1,nan\n2,inf\n",
    "the largest numbers": "step,loss\n1,1e308\n2,-1e308\n3,1e300\n",
    "the smallest numbers": "step,loss\n1,5e-324\n2,1e-320\n3,1\n",
    "equal numbers": "step,loss\n1,0\n2,0\n3,0\n",
    "large steps": "step,loss\n1,1\n9007199254740991,2\n",
    "steps that descend": "step,loss\n" + "".join(f"{step},{step}\n" for step in range(500, 0, -1)),
    "equal steps": "step,loss\n" + "5,1\n" * 300,
    "negative steps": "step,loss\n-5,1\n-3,2\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_numbers_stop_the_script(tab: Tab, tmp_path: Path, name: str) -> None:
    (tmp_path / "metrics.csv").write_text(HOSTILE[name])
    write_report(tmp_path)
    tab.open(tmp_path / "report.html", width=1280)
    assert tab.console == []
    assert tab.value("plots.length") == 1
    tab.mouse("Moved", *point(tab, 500))
    tab.settle()
    assert tab.console == []


def test_a_page_of_many_runs_draws_the_charts_that_come_near_the_window(tab: Tab, tmp_path: Path) -> None:
    names = [f"val/metric_{i}" for i in range(12)]
    for run in range(50):
        (tmp_path / f"run_{run}").mkdir()
        rows = "".join(f"{step},{','.join([str(step + run)] * len(names))}\n" for step in (1, 5, 9))
        (tmp_path / f"run_{run}" / "metrics.csv").write_text(f"step,{','.join(names)}\n{rows}")
    write_comparison(sorted(tmp_path.iterdir()), tmp_path / "report.html", sort=names[0])
    tab.open(tmp_path / "report.html", width=390)
    last = "plots.at(-1).drawn !== undefined"
    assert not tab.value(last)
    get_box(tab, '[data-chart="11"] .plot')
    tab.wait(last)
    assert tab.value("plots.at(-1).u.series.length") == 51
    tab.value("page.highlight(7); zoom('in')")
    tab.settle()
    assert steps_shown(tab) != (1, 9)
    get_box(tab, '[data-chart="0"] .plot')
    tab.wait("!plots[0].isStale")
    assert tab.value("plots[0].u.scales.x.min === view.first")
    assert tab.console == []
