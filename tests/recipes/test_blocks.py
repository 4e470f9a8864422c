"""A model with several towers of blocks is sharded, compiled, recomputed, adapted and optimized like one with one."""

import logging
from typing import Any

import pytest
import torch
from small_models import TOKENS, TwoTowers
from torch import Tensor, nn

from recipes.activation_checkpoint import ActivationCheckpoint
from recipes.adapter import find_targets
from recipes.blocks import keep_blocks, list_blocks, list_units, named_blocks
from recipes.compile import compile_blocks, is_compiled
from recipes.errors import ConfigError
from recipes.model.gpt2 import GPT2
from recipes.optimizer.muon import Muon
from recipes.parallel.stages import plan_stages
from recipes.plan.places import count_parameters
from recipes.plan.unroll import block_kinds


def make() -> TwoTowers:
    model = TwoTowers()
    model.init_weights(0)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    model(TOKENS).float().logsumexp(-1).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_blocks_are_listed_in_the_order_in_which_they_run() -> None:
    model, one = TwoTowers(), GPT2(vocab_size=8, max_seq_len=8, num_layers=2, num_heads=1, hidden_size=8, dropout=0.0)
    assert list_blocks(model) == [*model.narrow.blocks, *model.wide.blocks]
    assert named_blocks(one) == {"blocks": one.blocks}
    assert named_blocks(nn.Linear(1, 1)) == {}


def test_units_are_towers_and_what_is_beside_them_at_any_depth() -> None:
    model = TwoTowers()
    assert [unit for unit, _ in list_units(model)] == [
        model.embedding,
        model.narrow.blocks,
        model.project,
        model.wide.blocks,
        model.norm,
        model.head,
    ]
    assert [is_tower for _, is_tower in list_units(model)] == [False, True, False, True, False, False]
    before, within, after = count_parameters(model)
    assert within == sum(parameter.numel() for block in list_blocks(model) for parameter in block.parameters())
    assert before == sum(
        parameter.numel() for unit in (model.embedding, model.project) for parameter in unit.parameters()
    )
    assert before + within + after == sum(parameter.numel() for parameter in model.parameters())


def test_a_copy_keeps_chosen_blocks_of_both_towers() -> None:
    model = TwoTowers()
    kept = [list_blocks(model)[index] for index in (1, 2, 4)]
    keep_blocks(model, [1, 2, 4])
    assert list_blocks(model) == kept
    assert len(model.narrow.blocks) == 1


def test_recomputed_blocks_of_both_towers_have_the_same_gradients() -> None:
    plain, recomputed = make(), make()
    runs: list[int] = []
    for block in list_blocks(recomputed):
        block.get_submodule("attention").register_forward_pre_hook(lambda *_: runs.append(1))
    ActivationCheckpoint(every_nth_block=2).apply(list_blocks(recomputed))
    for ours, expected in zip(gradients(recomputed), gradients(plain), strict=True):
        assert torch.equal(ours, expected)
    assert len(runs) == 5 + 3, "every second of five blocks runs twice"


def test_blocks_of_both_towers_are_compiled() -> None:
    model = make()
    compile_blocks(list_blocks(model), mode="default", backend="eager")
    assert all(map(is_compiled, list_blocks(model)))
    assert torch.equal(model(TOKENS), make()(TOKENS))


def test_adapters_find_the_linear_layers_of_both_towers() -> None:
    found = find_targets(TwoTowers(), ["qkv"], setting="adapter.target_modules")
    assert found == [
        f"{name}.blocks.{n}.attention.qkv" for name, count in (("narrow", 2), ("wide", 3)) for n in range(count)
    ]


def test_muon_takes_the_matrices_of_both_towers(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    with caplog.at_level(logging.INFO, logger="lightning_recipes"):
        settings: dict[str, Any] = {"adamw_lr": None, "momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-8}
        optimizer = Muon(model, lr=0.02, weight_decay=0.1, **settings)
    hidden = optimizer.param_groups[0]["params"]
    assert len(hidden) == 5 * 4, "four matrices in each of five blocks"
    assert "2 x attention.qkv.weight [48, 16] as 3 matrices" in caplog.text
    assert "3 x attention.qkv.weight [96, 32] as 3 matrices" in caplog.text


def test_the_blocks_of_each_tower_are_of_a_kind_of_their_own() -> None:
    kinds = block_kinds(TwoTowers(), recomputes=lambda _: False)
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3] == kinds[4]


def test_a_pipeline_splits_one_tower_only() -> None:
    with pytest.raises(ConfigError) as raised:
        plan_stages(TwoTowers(), num_ranks=2, schedule="1F1B")
    assert str(raised.value) == (
        "pipeline_parallel_size=2: it splits one tower of blocks into stages, and TwoTowers has narrow.blocks and"
        " wide.blocks; type pipeline_parallel_size=1"
    )
