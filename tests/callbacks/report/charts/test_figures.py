"""What a chart is given to draw: colors, gaps at NaN, layers, log axes, stacked values, labels that do not overlap."""

import itertools
import math
from typing import Any

import pytest

from callbacks.report.charts.figures import (
    MAX_LEGEND_NAMES,
    NUM_COLORS,
    column_spans,
    get_colors,
    lines_figure,
    padded_range,
    stack_figure,
    steps_figure,
)
from callbacks.report.charts.series import Chart, Curve, make_curve, tick_labels


def draw(*curves: Curve, log_scale: bool = False, title: str = "loss") -> Any:
    return steps_figure(Chart(title, list(curves), log_scale, (0, 100), (0.0, 10.0)), span=6)


def get_curve(figure: Any) -> dict[str, Any]:
    [curve] = figure.data["curves"]
    return curve


def test_a_curve_is_steps_as_differences_and_values() -> None:
    figure = draw(make_curve("loss", [(3, 0.0), (50, 2.5), (100, 10.0)]))
    assert get_curve(figure)["steps"] == [3, 47, 50]
    assert get_curve(figure)["values"] == [0, 2.5, 10]
    assert (figure.data["kind"], figure.data["log"], figure.data["title"]) == ("steps", False, "loss")


def test_a_single_step_is_in_the_middle_of_a_padded_axis() -> None:
    assert padded_range((7, 7)) == (6, 8)
    assert padded_range((7, 9)) == (7, 9)


def test_a_log_axis_is_noted() -> None:
    figure = draw(make_curve("loss", [(0, 1.0), (100, 1000.0)]), log_scale=True)
    assert figure.data["log"]
    assert figure.notes == ["log scale"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_gap_and_is_noted(bad: float) -> None:
    figure = draw(make_curve("train/loss", [(0, 0.0), (20, 10.0), (40, bad), (60, 10.0), (80, bad)]))
    assert get_curve(figure)["values"] == [0, 10, None, 10, None]
    assert figure.notes == ["train/loss: 2 of 5 not finite, first at step 40"]
    [row] = figure.rows
    assert tuple(row) == ("train/loss", 0, 10, 10)


def test_a_curve_of_nothing_finite_has_a_row_without_values() -> None:
    [row] = draw(make_curve("loss", [(0, math.nan), (100, math.nan)])).rows
    assert tuple(row) == ("loss", None, None, None)


def test_a_curve_of_many_points_has_a_trend() -> None:
    points = [(step, float(step % 10)) for step in range(100)]
    curve = get_curve(draw(make_curve("loss", points, max_buckets=10)))
    assert curve["trend"]["values"] == [4.5] * 10
    assert list(itertools.accumulate(curve["trend"]["steps"])) == [5, *range(15, 100, 10)]


def test_rolled_back_points_are_lines_of_their_own() -> None:
    curve = make_curve("loss", [(0, 0.0), (100, 10.0)])
    curve.rolled_back.append([(50, 5.0), (60, 10.0)])
    curve.rolled_back.append([(80, 5.0)])
    drawn = get_curve(draw(curve))
    assert drawn["rolled_back"] == [{"steps": [50, 10], "values": [5, 10]}, {"steps": [80], "values": [5]}]
    assert drawn["values"] == [0, 10]


def test_a_step_that_comes_again_has_a_negative_difference() -> None:
    points = [(1, 3.0), (2, 9.0), (1, 3.0), (2, 2.5)]
    assert get_curve(draw(make_curve("loss", points)))["steps"] == [1, 1, -1, 1]


def test_a_curve_named_like_its_chart_needs_no_legend() -> None:
    assert draw(make_curve("loss", [(0, 1.0)])).keys == []
    [(color, name)] = draw(make_curve("train/loss", [(0, 1.0)])).keys
    assert (color.css, name) == ("c0", "train/loss")


def test_a_long_legend_names_the_ends_of_the_color_ramp_and_counts_the_curves() -> None:
    figure = draw(*(make_curve(f"m{i}", [(0, 1.0)]) for i in range(MAX_LEGEND_NAMES + 1)))
    assert [(color.css, name) for color, name in figure.keys] == [("ramp", "m0"), ("ramp", "m1"), ("ramp", "m8")]
    assert figure.notes == ["9 curves"]
    assert [curve["color"] for curve in figure.data["curves"]] == [color.hue for color in get_colors(9)]


def test_few_curves_have_distinct_colors_and_many_have_a_ramp_from_blue_to_red() -> None:
    assert [color.key for color in get_colors(NUM_COLORS)] == [f"c{i}" for i in range(NUM_COLORS)]
    hues = [color.hue for color in get_colors(24)]
    assert (hues[0], hues[-1]) == (250, 20)
    assert hues == sorted(hues, key=lambda hue: -(hue or 0))


@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize("num_charts", range(1, 14))
def test_charts_fill_every_row_of_six_columns(num_charts: int, leads: bool) -> None:
    spans = column_spans(num_charts, leads=leads)
    assert len(spans) == num_charts
    ends = list(itertools.accumulate(spans))
    assert ends[-1] % 6 == 0
    assert set(range(6, ends[-1], 6)) <= set(ends)  # no chart crosses the end of a row
    assert not leads or spans[0] == 6
    assert column_spans(6, leads=False) == [2] * 6


def test_lines_are_sorted_finite_points_and_axes_are_logarithmic_where_all_is_positive() -> None:
    lines = {"a": [(2.0, 1.0), (1.0, 3.0), (3.0, math.inf)], "none": [(1.0, math.nan)]}
    figure = lines_figure("by ranks", lines, marks={"best": 2.0}, log_x=True, log_y=True)
    assert get_curve(figure) == {"name": "a", "color": "c0", "x": [1, 2], "values": [3, 1]}
    assert (figure.data["log"], figure.data["log_x"]) == (True, True)
    assert figure.data["marks"] == [[2, "best"]]
    assert figure.notes == ["best 2"]
    zero = lines_figure("by size", {"a": [(0.0, 0.0), (1.0, 1.0)]}, marks={}, log_x=True, log_y=True)
    assert (zero.data["log"], zero.data["log_x"]) == (False, False)
    assert lines_figure("empty", {}, marks={}).data["curves"] == []


def test_a_stack_has_its_limit_unless_that_is_far_above_it() -> None:
    values, places = {"weights": [1.0, 1.0], "activations": [0.5, 2.0]}, ["forward, a", "backward, a"]
    figure = stack_figure(values, places=places, limit=4.0, unit="GiB per rank")
    assert [curve["values"] for curve in figure.data["curves"]] == [[1, 1], [0.5, 2]]
    assert (figure.data["places"], figure.data["limit"], figure.notes) == (places, 4.0, ["dashed: 4 usable"])
    assert stack_figure(values, places=places, limit=40.0, unit="GiB").data["limit"] is None


def test_the_labels_of_an_axis_differ_and_do_not_overlap() -> None:
    assert tick_labels([0.92, 0.92005, 0.9201]) == ["0.92", "0.92005", "0.9201"]
    assert tick_labels([0.0, 5000.0, 10000.0]) == ["0", "5000", "10k"]
    places = ["forward, blocks"] * 45 + ["backward, blocks"] * 50 + ["clipping"] * 2 + ["optimizer"] * 3
    figure = stack_figure({"weights": [1.0] * len(places)}, places=places, limit=None, unit="GiB")
    labels = {word: place for place, word in figure.data["labels"]}
    assert labels == {"forward": 0.225, "backward": 0.7, "optimizer": 0.94}
