"""Two shallow copies of a model give exactly the step of the deep one, or the deep one is recorded."""

from dataclasses import replace

import pytest
import torch
from plan_cases import DEEP, GPT, LLAMA, OFFLOAD, RECOMPUTE, SELECTIVE
from plan_steps import step_of

from recipes.plan.memory import find_peak, timeline
from recipes.plan.step import Step, record_step
from recipes.plan.trace import Op
from recipes.plan.unroll import block_kinds, find_period, record_unrolled

FSDP = ["strategy=fsdp", "precision=bf16-mixed"]


def _unrolled(step: Step) -> tuple[list[Op], list[object]]:
    recorded: list[object] = []

    def record(blocks: object) -> list[Op]:
        recorded.append(blocks)
        return record_step(step, blocks=blocks)  # type: ignore[arg-type]

    with torch.device("meta"):
        kinds = block_kinds(step.make_model(), recomputes=step.activation_checkpoint.recomputes)
    return record_unrolled(record, kinds), recorded


@pytest.mark.parametrize(
    ("overrides", "num_ranks"),
    [
        (DEEP, 1),
        ([*DEEP, RECOMPUTE], 1),
        ([*DEEP, RECOMPUTE, "activation_checkpoint.every_nth_block=2", "micro_batch_size=4"], 1),
        ([*DEEP, SELECTIVE, *OFFLOAD], 1),
        ([*LLAMA, "model.num_layers=9", "precision=bf16-mixed"], 1),
        ([*DEEP, *FSDP, "trainer.devices=2"], 2),
        ([*DEEP, *FSDP, RECOMPUTE, "trainer.devices=2", "micro_batch_size=1"], 2),
    ],
    ids=["gpt2", "recomputed", "every second recomputed", "selective, offloaded", "llama", "fsdp", "fsdp, recomputed"],
)
def test_an_unrolled_step_equals_the_recorded_one(overrides: list[str], num_ranks: int) -> None:
    step = step_of(overrides, num_ranks)
    record_step(step)  # the first of a process has operators of its own: DTensor caches what it derives
    unrolled, recorded = _unrolled(step)
    full = record_step(step)
    assert None not in recorded, "nothing was unrolled"
    assert [op.name for op in unrolled] == [op.name for op in full]
    assert [m.total for m in timeline(unrolled)] == [m.total for m in timeline(full)]
    assert sum(op.cost.flops for op in unrolled) == sum(op.cost.flops for op in full)
    assert sum(op.cost.num_bytes for op in unrolled) == pytest.approx(sum(op.cost.num_bytes for op in full), rel=1e-9)


def test_a_shallow_model_is_recorded_whole() -> None:
    _, recorded = _unrolled(step_of(GPT, 1))
    assert recorded == [None]


def test_blocks_of_different_kinds_are_recorded_whole() -> None:
    assert find_period(["a", "b", "c", "d", "e", "f", "g", "h"]) is None


def test_a_period_leaves_out_the_first_and_the_last_block() -> None:
    assert find_period(["first", *"ab" * 3, "last"]) == 2
    assert find_period(["a"] * 12) == 1


def test_a_frozen_config_of_an_average_of_the_weights_adds_its_state() -> None:
    step = step_of(DEEP, 1)
    plain, _ = _unrolled(step)
    averaged, _ = _unrolled(replace(step, ema_decay=0.99))
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in step.make_model().parameters())
    difference = find_peak(timeline(averaged)).total - find_peak(timeline(plain)).total
    assert difference == 4 * num_parameters
