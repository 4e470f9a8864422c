"""Thinned curves keep every spike, axes have round numbers, incomplete files are read as far as they go."""

import math
from pathlib import Path

import pytest

from callbacks.report.charts.series import (
    get_groups,
    get_marks,
    linear_ticks,
    log_ticks,
    make_curve,
    metrics_not_drawn,
    segments,
    tick_label,
    value_label,
)
from callbacks.report.dashboard import Panel, Section, sections_for
from callbacks.report.run_record import read_metrics, read_run


def test_one_spike_in_a_hundred_thousand_rows_is_drawn_at_full_height() -> None:
    points = [(step, 2.0 + 0.001 * (step % 7)) for step in range(1, 100_001)]
    points[61_803] = (61_804, 97.5)
    points[31_415] = (31_416, -4.0)
    curve = make_curve("train/loss", points)
    assert (61_804, 97.5) in curve.points
    assert (31_416, -4.0) in curve.points
    assert curve.points[0] == points[0]
    assert curve.points[-1] == points[-1]
    assert len(curve.points) <= 2001
    assert curve.num_points == 100_000
    assert [step for step, _ in curve.points] == sorted(step for step, _ in curve.points)


def test_two_thousand_points_are_all_kept() -> None:
    points = [(step, float(step)) for step in range(2000)]
    assert make_curve("lr", points).points == points


def test_a_nan_is_a_gap_and_is_counted_before_thinning() -> None:
    points = [(step, math.nan if step == 5000 else 1.0) for step in range(10_000)]
    curve = make_curve("train/loss", points)
    before, after = segments(curve.points)
    assert before[-1][0] < 5000 < after[0][0]
    assert (curve.num_not_finite, curve.first_not_finite) == (1, 5000)


def test_a_rollback_breaks_the_line_and_keeps_both_branches() -> None:
    curve = make_curve("train/loss", [(1, 3.0), (2, 9.0), (1, 3.0), (2, 2.5)])
    assert segments(curve.points) == [[(1, 3.0), (2, 9.0)], [(1, 3.0), (2, 2.5)]]


def write_metrics(folder: Path, metrics: str) -> Path:
    """Write metrics.csv and return the folder."""
    (folder / "metrics.csv").write_text(metrics)
    return folder


def test_charts_are_the_panels_that_the_run_has_metrics_for(tmp_path: Path) -> None:
    run = read_run(write_metrics(tmp_path, "step,train/loss,lr,val/loss,extra\n10,3.0,0.1,,7\n20,2.0,0.1,2.5,8\n"))
    learning = Section(
        title="learning",
        panels=(
            Panel(title="loss", metrics=("val/loss", "train/*")),
            Panel(title="accuracy", metrics=("val/accuracy",)),
            Panel(title="runs", metrics=("val/loss",), kind="bar"),
        ),
    )
    empty = Section(title="memory", panels=(Panel(title="memory", metrics=("memory/*",)),))
    groups = get_groups(run, [learning, empty])
    [group] = groups
    assert (group.title, [chart.title for chart in group.charts]) == ("learning", ["loss"])
    assert [curve.metric for curve in group.charts[0].curves] == ["val/loss", "train/loss"]
    assert group.charts[0].x_range == (10, 20)
    assert metrics_not_drawn(run, groups) == ["lr", "extra"]


def test_a_wide_range_of_losses_is_on_a_log_scale_and_speed_never_is(tmp_path: Path) -> None:
    rows = "step,train/loss,throughput/tokens_per_second\n1,900.0,1\n2,2.0,50000\n"
    run = read_run(write_metrics(tmp_path, rows))
    [loss], [speed] = [group.charts for group in get_groups(run, sections_for(run.series))]
    assert loss.log_scale
    assert loss.y_range[0] < 2.0 < 900.0 < loss.y_range[1]
    assert not speed.log_scale


def test_rolled_back_points_are_kept_apart_from_the_curve(tmp_path: Path) -> None:
    write_metrics(tmp_path, "step,train/loss\n1,3.0\n2,2.5\n")
    (tmp_path / "rolled_back").mkdir()
    (tmp_path / "rolled_back" / "steps_0000002_to_0000003.csv").write_text("step,train/loss\n2,9.0\n3,80\n")
    run = read_run(tmp_path)
    [curve] = get_groups(run, sections_for(run.series))[0].charts[0].curves
    assert curve.points == [(1, 3.0), (2, 2.5)]
    assert curve.rolled_back == [[(2, 9.0), (3, 80.0)]]


def test_a_rollback_mark_knows_the_step_it_came_from() -> None:
    [mark] = get_marks([{"step": 1, "event": "rollback", "from": 24}])
    assert (mark.step, mark.from_step) == (1, 24)


def test_only_some_kinds_of_events_are_marked_and_each_once_per_step() -> None:
    events = [
        {"step": 7, "event": "spike"},
        {"step": 7, "event": "spike"},
        {"step": 5, "event": "checkpoint"},
        {"step": 3, "event": "resume"},
        {"event": "stop"},
    ]
    assert [(mark.step, mark.event) for mark in get_marks(events)] == [(3, "resume"), (7, "spike")]


def test_a_row_that_is_cut_off_is_skipped(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, "step,a,b\n1,1.5,\n2,,nan\n3,2") / "metrics.csv"
    series = read_metrics(path)
    assert series["a"] == [(1, 1.5)]
    assert math.isnan(series["b"][0][1])


def test_a_last_event_that_is_cut_off_is_skipped(tmp_path: Path) -> None:
    write_metrics(tmp_path, "step,a\n1,1\n")
    (tmp_path / "events.jsonl").write_text('{"step": 1, "event": "start"}\n{"step": 2, "ev')
    assert read_run(tmp_path).events == [{"step": 1, "event": "start"}]


def test_a_table_without_steps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no column 'step'"):
        read_run(write_metrics(tmp_path, "epoch,loss\n1,2\n"))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 600, [0, 200, 400, 600]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (2.1, 6.9, [3, 4, 5, 6]),
        (0, 1e-3, [0, 2e-4, 4e-4, 6e-4, 8e-4, 1e-3]),
        (-3, 3, [-2, 0, 2]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert linear_ticks(low, high) == pytest.approx(ticks)


def test_log_ticks_are_powers_of_ten() -> None:
    assert log_ticks(0.5, 2000) == pytest.approx([1, 10, 100, 1000])
    assert len(log_ticks(1e-9, 1e9)) <= 5


def test_labels_are_short() -> None:
    values = (0, 0.5, 250, 12_000, 1_500_000, 3e-4, 1e-5)
    assert [tick_label(v) for v in values] == ["0", "0.5", "250", "12k", "1.5M", "3e-4", "1e-5"]
    measured = (3.45118, 4_915_200, 12345.6, 0.00098, math.nan)
    assert [value_label(v) for v in measured] == ["3.4512", "4,915,200", "12,346", "0.00098", "nan"]


def test_a_trend_is_the_mean_of_each_bucket_and_few_points_have_none() -> None:
    points = [(step, float(step % 10)) for step in range(1, 1001)]
    curve = make_curve("grad/norm", points, max_buckets=100)
    assert len(curve.trend) == 100
    assert {value for _, value in curve.trend} == {4.5}
    assert curve.trend[0][0] == 6
    assert curve.trend[-1][0] == 996
    assert make_curve("grad/norm", points[:400], max_buckets=100).trend == []


def test_a_bucket_without_a_finite_value_has_no_mean() -> None:
    points = [(step, math.nan if 100 < step <= 110 else 1.0) for step in range(1, 1001)]
    steps = [step for step, _ in make_curve("loss", points, max_buckets=100).trend]
    assert len(steps) == 99
    assert 106 not in steps
