"""Both pages in a real browser: nothing on the console, the right numbers under the pointer, zoom and back."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import PROGRAM, Browser

from callbacks.report.compare.page import write_comparison
from callbacks.report.page import write_report

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")
ROOT = Path(__file__).parents[3]
DASHBOARD = yaml.safe_load((ROOT / "conf" / "dashboard" / "default.yaml").read_text())["sections"]
SCREENS = [(1280, False), (1280, True), (390, False), (390, True)]
LAST = 1000


def write_run(folder: Path, number: int = 0) -> Path:
    """A thousand steps; the loss is 10 - step / 200, one spike and one NaN, and a rollback."""
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
    environment = {"overrides": [f"optimizer.decay={number}", "a_long_word=" + "x" * 90]}
    (folder / "environment.json").write_text(json.dumps(environment))
    summary = {"status": "finished", "steps": LAST, "val_loss": 5.0 + number, "tokens": 10**9}
    (folder / "summary.json").write_text(json.dumps(summary))
    operators = [{"name": "aten::" + "mm" * 40, "calls": 9, "self_seconds": 1.0, "share": 0.5}]
    (folder / "profile").mkdir()
    (folder / "profile" / "operators.json").write_text(json.dumps(operators))
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


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


def box_of(browser: Browser, selector: str) -> dict[str, float]:
    """Where an element is in the window, scrolled to."""
    find = f"document.querySelector({json.dumps(selector)})"
    browser.value(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    browser.settle()
    box: dict[str, float] = browser.value(f"{find}.getBoundingClientRect().toJSON()")
    return box


def plot(browser: Browser, step: float, *, of: int = 0) -> tuple[float, float]:
    """The point of a chart over a step."""
    box = box_of(browser, f'[data-chart="{of}"] svg')
    return box["x"] + step / LAST * box["width"], box["y"] + box["height"] / 2


def readout(browser: Browser, *, of: int = 0) -> list[list[str]]:
    """What stands under the pointer, row by row; none where nothing is shown."""
    found: list[list[str]] = browser.value(
        f"""(() => {{
          const box = document.querySelector('[data-chart="{of}"] .readout');
          const words = (row) => [...row.children].map((one) => one.textContent);
          return box.hidden ? [] : [...box.children].map(words);
        }})()"""
    )
    return found


def steps_shown(browser: Browser) -> tuple[int, int]:
    text: str = browser.value("document.querySelector('.zoom output').textContent")
    first, last = re.findall(r"\d+", text.replace(",", ""))
    return int(first), int(last)


@pytest.mark.parametrize(("width", "dark"), SCREENS)
@pytest.mark.parametrize("page", ["report", "comparison"])
def test_a_page_opens_without_a_complaint_and_is_no_wider_than_the_screen(
    browser: Browser, request: pytest.FixtureRequest, page: str, width: int, dark: bool
) -> None:
    browser.open(request.getfixturevalue(page), width=width, dark=dark)
    assert browser.complaints == []
    assert browser.value("document.documentElement.scrollWidth") <= width
    ground = browser.value("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(18, 19, 21)" if dark else "rgb(247, 247, 245)")
    assert browser.value("document.querySelectorAll('.curve').length") >= 6


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_the_pointer_shows_each_curve_at_its_nearest_step(
    browser: Browser, report: Path, width: int, dark: bool
) -> None:
    browser.open(report, width=width, dark=dark)
    x, y = plot(browser, 501)
    browser.mouse("Moved", x, y)
    browser.settle()
    [head, train, val] = readout(browser)
    step = int(head[1])
    assert abs(step - 501) <= 2 * LAST / width + 1
    assert train == ["train/loss", f"{10 - step / 200:.5g}"]
    assert val == ["val/loss at 500" if step != 500 else "val/loss", "7"]
    browser.mouse("Moved", x, y - 4000)
    browser.settle()
    assert readout(browser) == []
    assert browser.complaints == []


def test_the_pointer_names_the_events_beside_it(browser: Browser, report: Path) -> None:
    browser.open(report, width=1280)
    for step, told in ((400, ["spike", "step 400"]), (300, ["rollback", "from 400 back to 300"])):
        browser.mouse("Moved", *plot(browser, step))
        browser.settle()
        assert told in readout(browser)


def test_a_spike_and_a_nan_of_one_row_are_found_by_the_pointer(
    browser: Browser, report: Path
) -> None:
    browser.open(report, width=1280)
    for step, value in ((400, "77"), (700, "not finite")):
        browser.drag(plot(browser, step - 5)[0], plot(browser, step + 5)[0], plot(browser, 0)[1])
        box = box_of(browser, '[data-chart="0"] svg')
        browser.mouse("Moved", box["x"] + box["width"] / 2, box["y"] + 20)
        browser.settle()
        assert ["step", str(step)] in readout(browser)
        assert ["train/loss", value] in readout(browser)
        browser.value("document.querySelector('[data-zoom=all]').click()")
        browser.settle()


@pytest.mark.parametrize("page", ["report", "comparison"])
def test_a_drag_zooms_every_chart_and_a_double_click_shows_all_again(
    browser: Browser, request: pytest.FixtureRequest, page: str
) -> None:
    browser.open(request.getfixturevalue(page), width=1280)
    drawn = "[...document.querySelectorAll('.chart svg')].map((one) => one.innerHTML)"
    labels = "[...document.querySelectorAll('[data-chart=\"1\"] .x')].map((one) => one.textContent)"
    before = browser.value(drawn)
    assert steps_shown(browser) == (0, 1000)
    x, y = plot(browser, 200)
    browser.drag(x, plot(browser, 400)[0], y)
    first, last = steps_shown(browser)
    assert abs(first - 200) <= 1
    assert abs(last - 400) <= 1
    assert set(browser.value(labels)) >= {"250", "300", "350"}
    browser.mouse("Moved", *plot(browser, 500))  # the middle: step 300
    browser.settle()
    assert readout(browser)[0] == ["step", "300"]
    browser.click(*plot(browser, 500), times=2)
    assert steps_shown(browser) == (0, 1000)
    assert browser.value(drawn) == before
    assert browser.complaints == []


def test_the_axis_of_values_follows_the_steps_that_are_shown(
    browser: Browser, report: Path
) -> None:
    browser.open(report, width=1280)
    labels = "[...document.querySelectorAll('[data-chart=\"0\"] .y')].map((one) => Number(one.textContent))"
    assert max(browser.value(labels)) >= 60  # the spike
    x, y = plot(browser, 800)
    browser.drag(x, plot(browser, 1000)[0], y)
    assert 5 <= min(browser.value(labels)) < max(browser.value(labels)) <= 6


def test_keys_alone_move_the_read_out_zoom_and_go_back(browser: Browser, report: Path) -> None:
    browser.open(report, width=1280)
    browser.value("document.querySelector('[data-chart=\"0\"] svg').focus()")
    for _ in range(3):
        browser.key("ArrowRight")
    assert readout(browser)[0] == ["step", "4"]
    browser.key("+")
    assert steps_shown(browser) != (0, 1000)
    browser.key("Escape")
    assert steps_shown(browser) == (0, 1000)
    reset = "document.querySelector('[data-zoom=all]')"
    browser.value("document.querySelector('[data-zoom=in]').click()")
    browser.settle()
    assert steps_shown(browser) == (250, 750)
    assert browser.value(f"{reset}.tabIndex === 0 && !{reset}.disabled")


def test_two_fingers_zoom_and_a_button_shows_all_again(browser: Browser, report: Path) -> None:
    browser.open(report, width=390)
    x, y = plot(browser, 400)
    to, _ = plot(browser, 600)
    browser.fingers("Start", (x, y))
    browser.fingers("Start", (x, y), (to, y))
    for part in (10, 20, 30, 40):
        browser.fingers("Move", (x - part, y), (to + part, y))
    browser.fingers("End")
    browser.settle()
    first, last = steps_shown(browser)
    assert 200 < first < 400
    assert 600 < last < 800
    box = box_of(browser, "[data-zoom=all]")
    browser.click(box["x"] + 5, box["y"] + 5)
    assert steps_shown(browser) == (0, 1000)
    assert browser.complaints == []


def test_what_a_finger_touches_stays_to_be_read_until_it_touches_elsewhere(
    browser: Browser, report: Path
) -> None:
    browser.open(report, width=390)
    for chart, step in ((0, 300), (1, 800)):  # two taps at one place would be a double one
        browser.fingers("Start", plot(browser, step, of=chart))
        browser.fingers("End")
        browser.settle()
        assert len(readout(browser, of=chart)) >= 2
        assert readout(browser, of=1 - chart) == []
    box = box_of(browser, "h1")
    browser.fingers("Start", (box["x"] + 5, box["y"] + 5))
    browser.fingers("End")
    browser.settle()
    assert readout(browser, of=1) == []


def test_a_kind_of_event_is_hidden_by_its_key(browser: Browser, report: Path) -> None:
    browser.open(report, width=1280)
    seen = "getComputedStyle(document.querySelector('.plot .mark.e-spike')).display !== 'none'"
    assert browser.value(seen)
    browser.value("document.querySelector('[data-event=spike]').click()")
    assert not browser.value(seen)
    browser.mouse("Moved", *plot(browser, 400))
    browser.settle()
    assert ["spike", "step 400"] not in readout(browser)


def runs_in_table(browser: Browser) -> list[str]:
    found: list[str] = browser.value(
        "[...document.querySelectorAll('.runs tbody tr')].map((row) => row.cells[0].textContent)"
    )
    return found


def test_a_heading_sorts_the_runs_and_again_the_other_way(
    browser: Browser, comparison: Path
) -> None:
    browser.open(comparison, width=1280)
    assert runs_in_table(browser) == ["run_0", "run_1", "run_2"]
    heading = (
        "[...document.querySelectorAll('.runs th button')].find((one) => one.textContent === 'lr')"
    )
    browser.value(f"{heading}.click()")
    assert runs_in_table(browser) == ["run_2", "run_1", "run_0"]
    browser.value(f"{heading}.click()")
    assert runs_in_table(browser) == ["run_0", "run_1", "run_2"]
    assert browser.complaints == []


def test_the_pointer_shows_every_run_and_a_hidden_one_no_more(
    browser: Browser, comparison: Path
) -> None:
    browser.open(comparison, width=1280)
    browser.mouse("Moved", *plot(browser, 500))
    browser.settle()
    shown = readout(browser)
    step = int(shown[0][1])
    assert shown[1:] == [[f"run_{i}", f"{10 + i - step / 200:.5g}"] for i in (2, 1, 0)]
    browser.value("document.querySelector('.keys [data-toggle=\"1\"]').click()")
    browser.settle()
    browser.mouse("Moved", *plot(browser, 502))
    browser.settle()
    assert [name for name, _ in readout(browser)] == ["step", "run_2", "run_0"]
    assert browser.value("document.querySelectorAll('.curve[data-run=\"1\"]').length") == 0
    assert browser.complaints == []


def test_a_run_that_is_pointed_at_is_lit_on_the_whole_page(
    browser: Browser, comparison: Path
) -> None:
    browser.open(comparison, width=1280)
    box = box_of(browser, ".bar-row[data-run='2'] b")
    browser.mouse("Moved", box["x"] + 3, box["y"] + 3)
    browser.settle()
    faint = [
        browser.value(
            f"Number(getComputedStyle(document.querySelector('.thread[data-run=\"{i}\"]')).opacity)"
        )
        for i in range(3)
    ]
    assert faint[0] == faint[1] < 0.2 < faint[2]
    told: Any = browser.value("document.querySelector('.told').textContent")
    assert told == "run_2 · val loss 7 · lr 0.01 · decay 2"
