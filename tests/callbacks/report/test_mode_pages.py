"""The pages of plans, preflights and trials: what they are about, their totals in colors, nothing unescaped."""

import re
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from report_pages import get_data

from callbacks.report.mode_pages import write_plan_page, write_preflight_page, write_trial_page

ABOUT = {
    "name": "mine, quickstart, <gpt2>",
    "time": 1795667000.0,
    "devices": ["H100"] * 8,
    "hostname": "node1",
    "program": "PYTHONPATH=<mine> python train.py",
    "overrides": ["model=<gpt2>", "seq_len=64"],
}
PLAN = {"fits": False, "num_parameters": 8_030_261_248, "num_ranks": 8, "hardware": "h100", "usable_gib": 74.91}
PLAN |= {"peak_memory_gib": 89.85, "step_seconds": 1.25, "hours": 0.000247, "dollars": 3.5}
RESULTS = [
    {"check": "targets are the next tokens", "status": "pass", "found": "3 of 3", "remedy": None},
    {"check": "loss at the start", "status": "fail", "found": "9.1 <b>", "remedy": "smaller weights"},
    {"check": "loading is faster", "status": "warn", "found": "slow", "remedy": "more workers"},
    {"check": "gradients", "status": "pass", "found": "finite", "remedy": None},
    {"check": "what the model reads", "status": "look", "found": "<text>", "remedy": None},
]
PAGES: dict[str, Callable[[Path], None]] = {
    "Plan": lambda path: write_plan_page(path, PLAN, ["plan: <x>"], about=ABOUT),
    "Preflight": lambda path: write_preflight_page(path, RESULTS, [], about=ABOUT),
    "Range test": lambda path: write_trial_page(path, "Range test", ["found <x>"], [], about=ABOUT),
}


@pytest.mark.parametrize("title", PAGES)
def test_a_page_says_what_it_is_about(title: str, tmp_path: Path) -> None:
    PAGES[title](tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    named = f"{title}: mine, quickstart, &lt;gpt2&gt;"
    assert f"<title>{named}</title>" in page
    assert f"<h1>{named}</h1>" in page
    assert "<code>2026-11-26 04:23 UTC</code> · <code>8 x H100</code> · <code>node1</code>" in page
    typed = '<code class="typed">model=&lt;gpt2&gt;</code><code class="typed">seq_len=64</code>'
    assert f"<code>PYTHONPATH=&lt;mine&gt; python train.py</code>{typed}" in page
    assert "<x>" not in page


def test_totals_have_colors_and_failures_come_first(tmp_path: Path) -> None:
    PAGES["Preflight"](tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert re.findall(r'status (\w+)">(\d \w[^<]*)<', page) == [
        ("bad", "1 failed"),
        ("warn", "1 to look at"),
        ("good", "2 passed"),
    ]
    assert re.findall(r'<td><span class="status (\w+)">', page) == ["bad", "warn", "good", "good"]
    PAGES["Plan"](tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert '<span class="status bad">does not fit</span>' in page
    tiles = dict(re.findall(r"<dt>([^<]*)</dt><dd>(.*?)</dd>", page))
    assert tiles["memory of a rank"] == "89.85 <small>of 74.91 GiB</small>"
    assert (tiles["parameters"], tiles["the run"], tiles["price"]) == ("8,030,261,248", "0:01", "$3.50")


def test_input_images_are_pngs_scaled_to_their_own_range(tmp_path: Path) -> None:
    gray = [[[0.5, 1.5, 1.0], [0.5, 0.5, 1.5]]]
    write_preflight_page(tmp_path / "page.html", RESULTS, [(gray, 7), ([*gray, *gray, *gray], 8)], about=ABOUT)
    page = (tmp_path / "page.html").read_text()
    images = re.findall(r'src="data:image/png;base64,([^"]*)" width="96" height="64" alt="class (\d)"', page)
    assert [label for _, label in images] == ["7", "8"]
    for (data, _), channels in zip(images, (1, 3), strict=True):
        (tmp_path / "image.png").write_bytes(b64decode(data))
        pixels = matplotlib.image.imread(tmp_path / "image.png")  # [H, W] or [H, W, 3], from 0 to 1
        expected = np.round(255 * (np.array(gray[0]) - 0.5)) / 255
        assert np.allclose(pixels if channels == 1 else pixels[..., 2], expected)


def test_a_page_without_charts_has_no_script_and_one_with_charts_has_their_data(tmp_path: Path) -> None:
    PAGES["Preflight"](tmp_path / "page.html")
    assert "<script" not in (tmp_path / "page.html").read_text()
    figure = {"title": "loss </script>", "lines": {"</script>": [(1.0, 2.0)]}, "marks": {"<b>": 1.0}, "log_x": True}
    write_trial_page(tmp_path / "page.html", "Range test", ["x"], [figure], about=ABOUT)
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script") == page.count("</script>") == 2
    [chart] = get_data(page)["charts"]
    assert (chart["title"], chart["curves"][0]["name"], chart["marks"]) == ("loss </script>", "</script>", [[1, "<b>"]])


@pytest.mark.parametrize("plan", [PLAN, PLAN | {"timeline": {"gib": {"weights": [1, 2]}, "sections": ["a", "b"]}}])
def test_the_memory_of_a_plan_is_drawn_if_it_has_a_timeline(plan: dict[str, object], tmp_path: Path) -> None:
    write_plan_page(tmp_path / "page.html", plan, [], about=ABOUT)
    page = (tmp_path / "page.html").read_text()
    assert ("Memory over one step, as planned" in page) == ("timeline" in plan)
