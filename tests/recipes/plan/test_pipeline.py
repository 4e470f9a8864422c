"""Bubbles, micro-batches in flight and layers of a rank, against the published formulas."""

import pytest
from support import resolved

from recipes.errors import ConfigError
from recipes.plan.pipeline import Pipeline, read_pipeline

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")


def _pipeline(schedule: str = "1F1B", *, num_stages: int = 4) -> Pipeline:
    return Pipeline(num_stages=num_stages, schedule=schedule)


@pytest.mark.parametrize(("schedule", "share"), [("1F1B", 3 / 11), ("Interleaved1F1B", 1.5 / 9.5)])
def test_the_bubble_of_eight_micro_batches_on_four_stages(schedule: str, share: float) -> None:
    idle = _pipeline(schedule).idle_seconds(1.0, 2.0, weights=1.0)
    assert idle / (8 * 3.0 + idle) == pytest.approx(share)


def test_zero_bubbles_are_zero_where_forward_inputs_and_weights_take_equally_long() -> None:
    pipeline = _pipeline("ZBVZeroBubble")
    assert pipeline.idle_seconds(1.0, 2.0, weights=1.0) == 0.0
    assert pipeline.idle_seconds(1.0, 2.5, weights=1.0) == pytest.approx(3 * 0.5)


def test_the_first_stage_has_as_many_micro_batches_in_flight_as_there_are_stages() -> None:
    assert [_pipeline().in_flight(stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert _pipeline().in_flight(0, 2) == 2
    assert _pipeline("Interleaved1F1B").in_flight(0, 8) == 4 * (1 + 3 / (4 * 2))
    assert [_pipeline("ZBVZeroBubble").in_flight(stage, 8) for stage in range(4)] == [4] * 4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_block_is_on_one_rank_and_the_rank_of_the_head_has_fewer(schedule: str) -> None:
    counts = _pipeline(schedule).split(30, last=2.0)
    assert sum(counts) == 30
    with_head = 0 if schedule == "ZBVZeroBubble" else 3
    assert counts[with_head] == min(counts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 5}, "the model has 4 blocks"),
        ({"pipeline_parallel_size": 4, "pipeline_schedule": "Interleaved1F1B"}, "the model has 4 blocks"),
        ({"pipeline_schedule": "GPipe"}, "a plan has no formula for it"),
    ],
)
def test_what_cannot_be_planned_is_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_pipeline(
            resolved({"model": {"num_layers": 4}, "pipeline_parallel_size": 1, "pipeline_schedule": "1F1B"} | settings)
        )
