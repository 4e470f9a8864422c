"""Charts as SVG: round ticks, clipped values, log scales, gaps at NaN, marks and bands, escaped text, equal widths."""

import itertools
import math
import re

import pytest

from callbacks.report.charts.series import Chart, Curve, Mark, make_curve
from callbacks.report.charts.svg import (
    MAX_LEGEND_NAMES,
    NUM_COLORS,
    chart_html,
    column_spans,
    get_colors,
    padded_range,
    y_ticks,
)

Range = tuple[float, float]
EVIL = "</figure><script>alert(1)</script>&\"'"


def make_chart(
    *curves: Curve,
    y_range: Range = (0.0, 10.0),
    x_range: tuple[int, int] = (0, 100),
    log_scale: bool = False,
    title: str = "loss",
) -> Chart:
    return Chart(title, list(curves), log_scale, x_range, y_range)


def draw(chart: Chart, marks: list[Mark] | None = None, *, span: int = 6, max_buckets: int = 250) -> str:
    return chart_html(chart, marks or [], index=0, span=span, max_buckets=max_buckets)


def paths(html: str, css: str) -> list[str]:
    """Return the path data of every path that has exactly these classes, apart from its color."""
    found = re.findall(r'<path class="([^"]*)"[^>]* d="([^"]*)"', html)
    return [d for classes, d in found if re.sub(r" (c\d|ramp)$", "", classes) == css]


def labels(html: str, axis: str) -> list[tuple[str, str]]:
    """Return position and text of each label of an axis."""
    return re.findall(rf'<span class="{axis}" style="\w+:([\d.-]+%)">([^<]*)</span>', html)


def test_a_line_runs_from_the_lower_left_to_the_upper_right_corner() -> None:
    html = draw(make_chart(make_curve("loss", [(0, 0.0), (50, 2.5), (100, 10.0)])))
    assert paths(html, "curve") == ["M0 1000L500 750 1000 0"]
    assert paths(html, "curve dots") == []


def test_a_single_point_is_a_dot_in_the_middle_of_a_padded_axis() -> None:
    html = draw(make_chart(make_curve("loss", [(7, 5.0)]), x_range=(7, 7)))
    assert paths(html, "curve dots") == ["M500 500h0"]
    assert labels(html, "x") == [("50.00%", "7")]
    assert padded_range((7, 7)) == (6, 8)
    assert padded_range((7, 9)) == (7, 9)


def test_linear_ticks_are_labels_and_grid_lines_at_the_same_height() -> None:
    html = draw(make_chart(make_curve("loss", [(0, 1.0), (100, 9.0)])))
    assert labels(html, "y") == [
        ("100.00%", "0"), ("80.00%", "2"), ("60.00%", "4"),
        ("40.00%", "6"), ("20.00%", "8"), ("0.00%", "10"),
    ]  # fmt: skip
    assert paths(html, "grid") == ["M0 1000H1000M0 800H1000M0 600H1000M0 400H1000M0 200H1000M0 0H1000"]
    assert [text for _, text in labels(html, "x")] == ["0", "20", "40", "60", "80", "100"]


def test_steps_are_labeled_with_integers_only() -> None:
    html = draw(make_chart(make_curve("loss", [(1, 1.0), (3, 2.0)]), x_range=(1, 3)))
    assert [text for _, text in labels(html, "x")] == ["1", "2", "3"]


def test_a_log_axis_places_decades_at_equal_distances() -> None:
    curve = make_curve("loss", [(0, 1.0), (50, 10.0), (100, 1000.0)])
    chart = make_chart(curve, y_range=(1.0, 1000.0), log_scale=True)
    html = draw(chart)
    assert y_ticks(chart) == pytest.approx([1, 10, 100, 1000])
    assert paths(html, "curve") == ["M0 1000L500 666.7 1000 0"]
    assert [place for place, _ in labels(html, "y")] == ["100.00%", "66.67%", "33.33%", "0.00%"]
    assert '<span class="note">log scale</span>' in html


def test_a_log_axis_of_less_than_two_decades_has_round_ticks() -> None:
    chart = make_chart(make_curve("loss", [(0, 2.0)]), y_range=(2.0, 8.0), log_scale=True)
    assert y_ticks(chart) == pytest.approx([2, 4, 6, 8])


def test_zero_and_negative_values_on_a_log_axis_are_clipped_far_below_it() -> None:
    curve = make_curve("loss", [(0, 1.0), (50, 0.0), (100, -5.0)])
    html = draw(make_chart(curve, y_range=(1.0, 1000.0), log_scale=True))
    assert paths(html, "curve") == ["M0 1000L500 10000 1000 10000"]


def test_values_far_outside_the_range_are_clipped_to_nine_heights() -> None:
    curve = make_curve("loss", [(0, 5.0), (50, 1e300), (100, -1e300)])
    assert paths(draw(make_chart(curve)), "curve") == ["M0 500L500 -8000 1000 10000"]


def test_values_just_outside_the_range_keep_their_slope() -> None:
    curve = make_curve("loss", [(0, 0.0), (100, 20.0)])
    assert paths(draw(make_chart(curve)), "curve") == ["M0 1000L1000 -1000"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_gap_and_never_in_a_path(bad: float) -> None:
    points = [(0, 0.0), (20, 10.0), (40, bad), (60, 10.0), (80, bad), (90, 0.0), (100, 10.0)]
    html = draw(make_chart(make_curve("train/loss", points)))
    assert paths(html, "curve") == ["M0 1000L200 0M900 1000L1000 0"]
    assert paths(html, "curve dots") == ["M600 0h0"]
    assert not re.search(r'd="[^"]*(nan|inf)', html)
    assert "train/loss: 2 of 7 not finite, first at step 40" in html


def test_a_curve_of_nothing_finite_draws_no_path() -> None:
    html = draw(make_chart(make_curve("loss", [(0, math.nan), (100, math.nan)])))
    assert re.findall(r'<path class="([^"]*)"', html) == ["grid"]


def test_a_curve_of_many_points_is_faint_below_its_trend() -> None:
    points = [(step, float(step % 10)) for step in range(101)]
    curve = make_curve("loss", points, max_buckets=10)
    html = draw(make_chart(curve))
    assert len(paths(html, "curve noisy")) == len(paths(html, "trend")) == 1
    assert paths(html, "curve") == []


def test_rolled_back_points_are_a_layer_of_their_own() -> None:
    curve = make_curve("loss", [(0, 0.0), (100, 10.0)])
    curve.rolled_back.append([(50, 5.0), (60, 10.0)])
    curve.rolled_back.append([(80, 5.0)])
    html = draw(make_chart(curve))
    assert paths(html, "rolled-back") == ["M500 500L600 0"]
    assert paths(html, "rolled-back dots") == ["M800 500h0"]
    assert paths(html, "curve") == ["M0 1000L1000 0"]


def test_a_mark_is_a_vertical_line_and_equal_marks_are_drawn_once() -> None:
    marks = [Mark(50, "spike"), Mark(50, "spike"), Mark(20, "spike"), Mark(50, "skip")]
    html = draw(make_chart(make_curve("loss", [(0, 1.0)])), marks)
    assert paths(html, "mark e-spike") == ["M200 0V1000M500 0V1000"]
    assert paths(html, "mark e-skip") == ["M500 0V1000"]
    assert "band" not in html


def test_a_rollback_is_a_band_over_the_steps_it_discarded() -> None:
    html = draw(make_chart(make_curve("loss", [(0, 1.0)])), [Mark(40, "rollback", 90)])
    assert paths(html, "band e-rollback") == ["M400 0H900V1000H400Z"]
    assert paths(html, "mark e-rollback") == ["M400 0V1000"]


def test_a_mark_outside_the_steps_is_not_drawn() -> None:
    html = draw(make_chart(make_curve("loss", [(0, 1.0)])), [Mark(-1, "spike"), Mark(101, "spike")])
    assert "mark" not in html


def test_titles_and_metric_names_are_escaped() -> None:
    curves = [make_curve(EVIL, [(0, math.nan)]), make_curve("b", [(0, 1.0)])]
    html = draw(make_chart(*curves, title=EVIL))
    assert "<script" not in html
    assert html.count("</figure>") == 1
    assert html.count("&lt;/figure&gt;") == 4  # title, label, legend, note


def test_a_curve_named_like_its_chart_needs_no_legend() -> None:
    assert 'class="key' not in draw(make_chart(make_curve("loss", [(0, 1.0)])))
    html = draw(make_chart(make_curve("train/loss", [(0, 1.0)])))
    assert '<span class="key c0">train/loss</span>' in html


def test_a_long_legend_names_the_ends_of_the_color_ramp_and_counts_the_curves() -> None:
    curves = [make_curve(f"m{i}", [(0, 1.0)]) for i in range(MAX_LEGEND_NAMES + 1)]
    html = draw(make_chart(*curves))
    assert re.findall(r'class="key ramp"[^>]*>(\w+)<', html) == ["m0", "m1", "m8"]
    assert "9 curves" in html


def test_few_curves_have_distinct_colors_and_many_have_a_ramp_from_blue_to_red() -> None:
    assert [color.css for color in get_colors(NUM_COLORS)] == [f"c{i}" for i in range(NUM_COLORS)]
    hues = [color.hue for color in get_colors(24)]
    assert (hues[0], hues[-1]) == (250, 20)
    assert hues == sorted(hues, key=lambda hue: -(hue or 0))
    assert get_colors(24)[0].attributes("curve") == 'class="curve ramp" style="--hue:250"'


def test_a_curve_is_thinned_to_the_buckets_it_is_given_and_keeps_its_spike() -> None:
    points = [(step, 1.0) for step in range(1000)]
    points[617] = (617, 10.0)
    html = draw(make_chart(make_curve("loss", points), x_range=(0, 1000)), max_buckets=10)
    [path] = paths(html, "curve")
    assert path.count(" ") <= 2 * (4 * 10 + 1)
    assert "617 0" in path


@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize("num_charts", range(1, 14))
def test_charts_fill_every_row_of_six_columns(num_charts: int, leads: bool) -> None:
    spans = column_spans(num_charts, leads=leads)
    assert len(spans) == num_charts
    ends = list(itertools.accumulate(spans))
    assert ends[-1] % 6 == 0
    assert set(range(6, ends[-1], 6)) <= set(ends)  # no chart crosses the end of a row
    assert not leads or spans[0] == 6


def test_equal_charts_are_drawn_equally_wide_wherever_they_stand() -> None:
    chart = make_chart(make_curve("loss", [(0, 1.0), (100, 9.0)]))
    wide, narrow = draw(chart, span=6), draw(chart, span=2)
    assert narrow == wide.replace("span6", "span2")
    assert column_spans(6, leads=False) == [2] * 6
