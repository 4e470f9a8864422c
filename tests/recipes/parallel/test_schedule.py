"""A step of a pipeline on one rank that has all stages, and what torch's schedules still do that ours avoids."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from recipes.mesh import STAGES_PER_RANK
from recipes.model.llama import Llama
from recipes.parallel.schedule import PipelineSchedule, idle_fraction
from recipes.parallel.stages import PipelineRanks, StagedModel, cut_stage, plan_stages
from recipes.plan.fake_rank import fake_ranks

NUM_MICRO_BATCHES = 4
ROWS = torch.arange(8 * 9).reshape(8, 9) % 59


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Let this process be the only rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _llama() -> Llama:
    sizes = {"vocab_size": 60, "max_seq_len": 8, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1}
    model = Llama(**sizes, hidden_size=16, ffn_hidden_size=32, rope_theta=1e4)
    model.init_weights(1)
    return model


def _make(model: Llama, schedule: str) -> tuple[StagedModel, PipelineSchedule]:
    plan = plan_stages(model, num_ranks=1, schedule=schedule)
    ranks = PipelineRanks(dist.group.WORLD, plan, torch.device("cpu"))  # type: ignore[arg-type]
    staged = StagedModel({stage: cut_stage(model, plan, stage) for stage in range(plan.num_stages)}, ranks)
    return staged, PipelineSchedule(staged, num_micro_batches=NUM_MICRO_BATCHES, dtype=torch.float32)


def _compute(forward: Callable[..., Any], hidden: Tensor, rest: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(forward(hidden).flatten(0, 1), rest["targets"].flatten(), reduction="sum").reshape(1)


@pytest.mark.parametrize("schedule", ["1F1B", *STAGES_PER_RANK])
def test_a_step_computes_each_micro_batch_once_and_the_gradients_of_all(schedule: str, group: None) -> None:
    calls = 0

    def compute(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return _compute(*args)

    whole = _llama()
    staged, made = _make(_llama(), schedule)
    for width in (8, 4):  # the second shape of rows, with gradients of the first
        rows = ROWS[:, : width + 1]
        made.step(rows[:, :-1], {"targets": rows[:, 1:]}, compute)
        _compute(whole, rows[:, :-1], {"targets": rows[:, 1:]}).backward()  # type: ignore[no-untyped-call]
    assert calls == 2 * NUM_MICRO_BATCHES
    for name, parameter in staged.named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=1e-5, atol=1e-5, msg=name)


def _make_of_torch(schedule: str, *, num_stages: int) -> tuple[Any, list[Tensor]]:
    """Return a schedule of torch's that infers shapes, and the outputs whose loss was asked for."""
    asked: list[Tensor] = []

    def loss(out: Tensor, target: Tensor) -> Tensor:
        asked.append(out)
        return F.mse_loss(out, target)

    stages = [PipelineStage(nn.Linear(4, 4), stage, num_stages, torch.device("cpu")) for stage in range(num_stages)]
    kind = get_schedule_class(schedule)
    made = kind(stages if num_stages > 1 else stages[0], n_microbatches=NUM_MICRO_BATCHES, loss_fn=loss)  # type: ignore[arg-type]
    return made, asked


def test_torch_still_asks_for_the_loss_once_more_in_a_first_step(group: None) -> None:
    """2.13, `PipelineSchedule._make_stage`, which says the shapes: a loss is counted where it is computed."""
    schedule, asked = _make_of_torch("1F1B", num_stages=1)
    counts = []
    for _ in range(2):
        schedule.step(torch.ones(8, 4), target=torch.ones(8, 4))
        counts.append(len(asked))
    assert counts == [NUM_MICRO_BATCHES + 1, 2 * NUM_MICRO_BATCHES + 1]


def test_torch_still_cannot_evaluate_a_v(group: None) -> None:
    """2.13, `StagedModel.forward`, which needs no schedule."""
    schedule, _ = _make_of_torch("ZBVZeroBubble", num_stages=2)
    with pytest.raises(AssertionError, match="can't steal_bwd_input"):
        schedule.eval(torch.ones(8, 4), target=torch.ones(8, 4))
    staged, _ = _make(_llama(), "ZBVZeroBubble")
    with torch.no_grad():
        assert torch.equal(staged(ROWS[:, :8]), _llama()(ROWS[:, :8]))


def test_torch_still_cannot_split_the_backward_pass_of_a_compiled_block(group: None) -> None:
    """2.13, `config.check.pipeline`: without a split, compiled blocks work."""
    for schedule in ("Interleaved1F1B", "ZBVZeroBubble"):
        model = _llama()
        _, made = _make(model, schedule)
        for block in model.blocks:
            block.compile(backend="aot_eager", dynamic=False)
        if schedule == "Interleaved1F1B":
            made.step(ROWS[:, :8], {"targets": ROWS[:, 1:]}, _compute)
            continue
        with pytest.raises(RuntimeError, match="Failed to run stage backward input"):
            made.step(ROWS[:, :8], {"targets": ROWS[:, 1:]}, _compute)


def test_a_rank_waits_a_ninth_of_eight_micro_batches_on_two_ranks_half_of_it_interleaved_and_not_at_all_in_a_v() -> (
    None
):
    assert idle_fraction("1F1B", 2, 8) == pytest.approx(1 / 9)
    assert idle_fraction("Interleaved1F1B", 2, 8) == pytest.approx(0.5 / 8.5)
    assert idle_fraction("ZBVZeroBubble", 2, 8) == 0.0


def test_of_many_shapes_of_rows_the_last_four_keep_their_buffers() -> None:
    with fake_ranks(2):
        plan = plan_stages(_llama(), num_ranks=2, schedule="1F1B")
        ranks = PipelineRanks(dist.group.WORLD, plan, torch.device("cpu"))  # type: ignore[arg-type]
        staged = StagedModel({0: cut_stage(_llama(), plan, 0)}, ranks)
        schedule = PipelineSchedule(staged, num_micro_batches=2, dtype=torch.float32)
        made = [schedule._get_schedule(torch.Size([4, width])) for width in (8, 16, 24, 32, 40)]
        again = [schedule._get_schedule(torch.Size([4, width])) for width in (16, 24, 32, 40)]
        assert all(one is other for one, other in zip(again, made[1:], strict=True))
        assert schedule._get_schedule(torch.Size([4, 8])) is not made[0]
