"""NotebookBar: the chart of a cell; tests/docs/test_notebook.py shows it in a kernel."""

import math
from xml.etree import ElementTree

import pytest

from callbacks.progress.notebook import MAX_POINTS, NotebookBar, draw_chart, is_notebook

SVG = "{http://www.w3.org/2000/svg}"


def test_this_process_is_no_notebook() -> None:
    assert not is_notebook()


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, 2.0), (2, 2.0)], [(1, 4.0), (2, 1e30), (3, -1.0)]])
def test_a_chart_keeps_every_point_within_its_axes(points: list[tuple[int, float]]) -> None:
    chart = ElementTree.fromstring(draw_chart({"train loss": points, "val loss": points[:1]}))
    train, val = [line.attrib["points"].split() for line in chart.iter(f"{SVG}polyline")]
    assert (len(train), len(val)) == (len(points), 1)
    for place in (*train, *val):
        x, y = map(float, place.split(","))
        assert 56 <= x <= 628, place
        assert 12 <= y <= 176, place
    texts = [text.text for text in chart.iter(f"{SVG}text")]
    assert texts[-2:] == ["train loss", "val loss"]
    assert f"step {points[-1][0]}" in texts


def test_steps_that_are_trained_again_replace_those_of_before_and_nan_is_left_out() -> None:
    bar = NotebookBar()
    for step, loss in [(1, 4.0), (2, 3.0), (3, 9.0), (2, 2.5), (3, math.nan), (4, 2.0)]:
        bar.add_loss("train loss", step, loss)
    assert bar.curves == {"train loss": [(1, 4.0), (2, 2.5), (4, 2.0)]}


def test_a_long_run_keeps_its_spike() -> None:
    bar = NotebookBar()
    for step in range(1, 10_001):
        bar.add_loss("train loss", step, 100.0 if step == 777 else 1.0)
    [points] = bar.curves.values()
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
    assert (777, 100.0) in points
