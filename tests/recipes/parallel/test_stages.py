"""Layers are divided so that the stage with the most work has the least, and every rank knows which stages it has."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

from recipes.mesh import STAGES_PER_RANK
from recipes.model.gpt2 import GPT2
from recipes.model.llama import Llama
from recipes.parallel.stages import StagedModel, StagePlan, cut_stage, divide_evenly, mark_copies, plan_stages


def _worst(work: list[int], counts: list[int], last: int) -> int:
    sums, start = [], 0
    for count in counts:
        sums.append(sum(work[start : start + count]))
        start += count
    sums[-1] += last
    return max(sums)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_division_has_less_work_on_its_worst_stage(seed: int) -> None:
    rng = random.Random(seed)
    work = [rng.randint(1, 9) for _ in range(rng.randint(2, 9))]
    num_stages, last = rng.randint(1, len(work)), rng.choice([0, 3, 20])
    counts = divide_evenly(work, num_stages, last=last)
    assert sum(counts) == len(work)
    assert min(counts) >= 1
    cuts = itertools.combinations(range(1, len(work)), num_stages - 1)
    bounds = ([0, *cut, len(work)] for cut in cuts)
    least = min(_worst(work, [b - a for a, b in itertools.pairwise(bound)], last) for bound in bounds)
    assert _worst(work, counts, last) == least


def test_a_head_as_large_as_three_layers_leaves_the_last_stage_one_layer_of_eight() -> None:
    counts = divide_evenly([1] * 8, 3, last=3)
    assert sorted(counts[:2]) == [3, 4]
    assert counts[2] == 1


@pytest.mark.parametrize("schedule", ["1F1B", *STAGES_PER_RANK])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_stage_is_on_one_rank_and_a_v_ends_where_it_began(schedule: str, num_ranks: int) -> None:
    num_stages = num_ranks * STAGES_PER_RANK.get(schedule, 1)
    plan = StagePlan(num_ranks=num_ranks, schedule=schedule, layers=tuple((stage, 1) for stage in range(num_stages)))
    of_ranks = [plan.stages_of(rank) for rank in range(num_ranks)]
    assert sorted(stage for stages in of_ranks for stage in stages) == list(range(num_stages))
    assert all(plan.rank_of(stage) == rank for rank, stages in enumerate(of_ranks) for stage in stages)
    ends = {"1F1B": num_ranks - 1, "Interleaved1F1B": num_ranks - 1, "ZBVZeroBubble": 0}
    assert plan.rank_of(num_stages - 1) == ends[schedule]


def _gpt2(*, tied: bool) -> GPT2:
    sizes = {"vocab_size": 60, "max_seq_len": 8, "num_layers": 4, "num_heads": 2, "hidden_size": 16}
    torch.manual_seed(0)
    model = GPT2(**sizes, dropout=0.0, tie_embeddings=tied)
    model.init_weights(1)
    return model


def _llama() -> Llama:
    sizes = {"vocab_size": 60, "max_seq_len": 8, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1}
    model = Llama(**sizes, hidden_size=16, ffn_hidden_size=32, rope_theta=1e4)
    model.init_weights(1)
    return model


@pytest.mark.parametrize("model", [_gpt2(tied=False), _gpt2(tied=True), _llama()], ids=["gpt2", "tied", "llama"])
def test_stages_one_after_the_other_are_the_model_and_have_its_names(model: nn.Module) -> None:
    plan = plan_stages(model, num_ranks=3, schedule="1F1B")
    parts = [cut_stage(model, plan, stage) for stage in range(3)]
    tokens = torch.arange(16).view(2, 8)
    x = tokens
    for part in parts:
        x = part(x)
    assert torch.equal(x, model(tokens))
    names = [name for part in parts for name, _ in part.named_parameters()]
    copied = ["head.weight"] if getattr(model, "tie_embeddings", False) else []
    assert sorted(names) == sorted([name for name, _ in model.named_parameters()] + copied)


def test_a_tied_head_is_a_copy_that_knows_what_it_is_a_copy_of() -> None:
    model = _gpt2(tied=True)
    last = cut_stage(model, plan_stages(model, num_ranks=2, schedule="1F1B"), 1)
    mark_copies(last)
    assert last.head.weight is not model.embedding.weight  # type: ignore[union-attr]
    assert last.head.weight.copy_of == "embedding.weight"  # type: ignore[union-attr]
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("tied", [True, False])
def test_first_weights_of_stages_are_bit_for_bit_those_of_one_device(tied: bool) -> None:
    expected = dict(_gpt2(tied=tied).named_parameters())
    plan = plan_stages(_gpt2(tied=tied), num_ranks=2, schedule="1F1B")
    for stage in (0, 1):
        part: Any = cut_stage(_gpt2(tied=tied), plan, stage)
        for parameter in part.parameters():
            parameter.data.fill_(torch.nan)
        mark_copies(part)
        part.init_weights(1)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, expected[getattr(parameter, "copy_of", name)]), name


def test_what_is_set_on_one_stage_is_not_set_on_another() -> None:
    """Hooks of FSDP2 gather and free a stage: another one's would free it between its forward and backward pass."""
    model = _llama()
    plan = plan_stages(model, num_ranks=2, schedule="1F1B")
    first, last = (cut_stage(model, plan, stage) for stage in (0, 1))
    calls: list[int] = []
    first.register_forward_pre_hook(lambda *_: calls.append(0))
    last.register_forward_hook(lambda *_: calls.append(1))
    last.register_buffer("own", torch.zeros(1), persistent=False)
    last(first(torch.arange(8)[None]))
    assert calls == [0, 1]
    model(torch.arange(8)[None])
    assert calls == [0, 1]
    assert not hasattr(first, "own")


class _Alone:
    """The ranks of a pipeline of one rank with two stages."""

    own_stages = (0, 1)
    rank = 0
    has_last = True
    plan = StagePlan(num_ranks=1, schedule="1F1B", layers=((0, 2), (2, 2)))

    def share_last(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_the_stages_of_a_rank_have_the_names_of_the_model_and_compute_without_gradients_only() -> None:
    model = _llama()
    staged = StagedModel({stage: cut_stage(model, _Alone.plan, stage) for stage in (0, 1)}, _Alone())  # type: ignore[arg-type]
    assert [name for name, _ in staged.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert staged.vocab_size == 60
    for mode in (False, True):  # as `train` and `eval` do, and what restores the mode of each module
        staged.train(mode)
        assert all(part.training == mode for part in [*staged.modules(), *staged.parts.values()])
        staged.training = not mode
        assert all(part.training != mode for part in staged.parts.values())
    staged.train()
    with pytest.raises(RuntimeError, match="torch.no_grad"):
        staged(torch.arange(8)[None])
    with torch.no_grad():
        assert torch.equal(staged(torch.arange(8)[None]), model(torch.arange(8)[None]))
