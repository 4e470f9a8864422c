"""The pages of plans, preflights and trials: what they are about, their totals in colors, nothing unescaped."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from callbacks.report.charts.axis import tick_labels
from callbacks.report.charts.stack import stack_figure
from callbacks.report.plan_page import write_plan_page
from callbacks.report.preflight_page import write_preflight_page
from callbacks.report.trial_page import write_trial_page

ABOUT = {
    "name": "mine, quickstart, <gpt2>",
    "time": 1795667000.0,
    "devices": ["H100"] * 8,
    "hostname": "node1",
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
    assert '<code class="typed">model=&lt;gpt2&gt;</code><code class="typed">seq_len=64</code>' in page
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


def test_the_labels_of_an_axis_differ_and_do_not_overlap() -> None:
    assert tick_labels([0.92, 0.92005, 0.9201]) == ["0.92", "0.92005", "0.9201"]
    assert tick_labels([0.0, 5000.0, 10000.0]) == ["0", "5000", "10k"]
    places = ["forward, blocks"] * 45 + ["backward, blocks"] * 50 + ["clipping"] * 2 + ["optimizer"] * 3
    values: dict[str, Any] = {"weights": [1.0] * len(places)}
    page = stack_figure(values, places=places, limit=None, unit="GiB")
    labels = {word: float(left) for left, word in re.findall(r'class="x" style="left:([\d.]+)%">(\w+)', page)}
    assert labels == {"forward": 22.5, "backward": 70.0, "optimizer": 94.0}
