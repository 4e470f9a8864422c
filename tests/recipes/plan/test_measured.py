"""Operators are timed alone, each distinct one once, on real tensors of the recorded shapes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from plan_cases import DEEP, GPT, cpu_cluster
from plan_steps import config_of, step_of
from support import resolved

from recipes.errors import ConfigError
from recipes.plan.measured import OperatorTimer, time_operators
from recipes.plan.plan import make_plan
from recipes.plan.step import record_step
from recipes.plan.trace import Op


class _CountingTimer(OperatorTimer):
    """Counts what is run."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.measured = 0

    def _measure(self, call: Any) -> Any:
        self.measured += 1
        return super()._measure(call)


def _recorded() -> list[Op]:
    return record_step(step_of(GPT, 1), keep_calls=True)


def test_an_operator_that_comes_again_is_not_timed_again() -> None:
    ops, timer = _recorded(), _CountingTimer()
    first = time_operators(ops, timer, factor=1.0)
    num_measured = timer.measured
    assert 20 < num_measured < len(ops) / 2  # four blocks of the same operators
    assert time_operators(ops, timer, factor=1.0).of("").total == first.of("").total
    assert timer.measured == num_measured


def test_every_section_of_a_step_takes_time() -> None:
    step = time_operators(_recorded(), OperatorTimer(torch.device("cpu")), factor=1.0)
    for section in ("forward/block 1", "forward/head", "backward/block 1", "clipping", "optimizer"):
        assert step.sections[section].total > 0, section


def test_an_operator_on_longer_lists_takes_longer_in_proportion() -> None:
    timer = OperatorTimer(torch.device("cpu"))
    [adam] = [op for op in _recorded() if "_fused_adamw_" in op.name][:1]
    grown = replace(adam, cost=replace(adam.cost, num_bytes=3 * adam.cost.num_bytes))
    assert timer.seconds_of(grown) == pytest.approx(3 * timer.seconds_of(adam))


def test_a_deep_model_is_timed_as_one_of_few_blocks() -> None:
    timer = _CountingTimer()
    plan = make_plan(resolved(config_of([*DEEP, "trainer.devices=1"])), cpu_cluster(1), rates=timer)
    assert plan.times is not None
    assert plan.times.step_seconds > 0
    assert timer.measured < 120


def test_several_ranks_are_not_timed() -> None:
    config = config_of([*GPT, "strategy=ddp", "trainer.devices=2"])
    with pytest.raises(ConfigError, match=r"plan\.hardware=measured with 2 ranks"):
        make_plan(resolved(config), cpu_cluster(2), rates=OperatorTimer(torch.device("cpu")))
