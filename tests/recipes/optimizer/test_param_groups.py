"""Weight decay acts on matrices only, and a tied matrix is decayed once."""

import functools

import pytest
import torch
from support import composed_config
from torch import nn

from recipes.config.instantiate import make_optimizer
from recipes.model.gpt2 import GPT2
from recipes.model.weights import initialize
from recipes.optimizer import rules
from recipes.optimizer.adamw import adamw
from recipes.optimizer.param_groups import decay_groups, drop_unused_groups, hold_bounds


def small() -> GPT2:
    model = GPT2(vocab_size=64, max_seq_len=8, num_layers=2, num_heads=2, hidden_size=16, dropout=0.0)
    initialize(model, seed=0)
    return model


def test_biases_and_norms_are_not_decayed_and_every_parameter_is_in_one_group() -> None:
    model = small()
    decay, no_decay = decay_groups(model, weight_decay=0.1)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.ndim >= 2 for parameter in decay["params"])
    assert all(parameter.ndim == 1 for parameter in no_decay["params"])
    grouped = [id(parameter) for parameter in decay["params"] + no_decay["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


def test_frozen_parameters_are_in_no_group() -> None:
    model = small()
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    groups = decay_groups(model, weight_decay=0.1)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # two embeddings, weight and bias of the last norm
    assert sum(len(group["params"]) for group in groups) == len(trainable) == 4
    assert all(parameter.requires_grad for group in groups for parameter in group["params"])


def test_every_rank_has_the_same_groups_whichever_of_them_are_empty() -> None:
    vectors, matrices = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4, bias=False)
    names = [[group["group_name"] for group in decay_groups(model, weight_decay=0.1)] for model in (vectors, matrices)]
    assert names == [["decay", "no_decay"]] * 2
    optimizer = torch.optim.AdamW(decay_groups(vectors, weight_decay=0.1), fused=True)
    vectors(torch.ones(2, 4)).sum().backward()
    optimizer.step()  # an empty group is stepped over
    drop_unused_groups(optimizer, used=[False, True])
    assert [group["group_name"] for group in optimizer.param_groups] == ["no_decay"]


@pytest.mark.parametrize(
    "option",
    [
        "adamw",
        "adamw_8bit",
        "schedule_free",
        "adam",
        "sgd",
        "lion",
        "adafactor",
        "muon",
    ],
)
def test_an_optimizer_instantiated_from_its_config_takes_a_step(option: str) -> None:
    model = small()
    config = composed_config(f"optimizer={option}")
    optimizer = make_optimizer(config)(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.arange(8)[None]).logsumexp(-1).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == config["optimizer"]["lr"]
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert any(moved)


class Scaled(nn.Module):
    """A matrix, a vector, and a scale with bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(1))

    def bounds(self) -> dict[str, tuple[float, float]]:
        return {"scale": (0.0, 1.5)}


def make_grouped(model: nn.Module) -> torch.optim.Optimizer:
    construct = functools.partial(adamw, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)
    return rules.make_optimizer(model, construct=construct)


def test_a_parameter_with_bounds_has_a_group_of_its_own_and_stays_within_them() -> None:
    model = Scaled()
    rules.apply_rules(model, freeze=[], groups=[{"match": "^scale", "lr_scale": 10.0}], layer_decay=None)
    optimizer = make_grouped(model)
    [group] = [each for each in optimizer.param_groups if "bounds" in each]
    assert (group["group_name"], group["params"], group["bounds"]) == ("scale", [model.scale], [0.0, 1.5])
    assert (group["lr"], group["weight_decay"]) == (pytest.approx(1.0), 0.0)
    assert sum(len(each["params"]) for each in optimizer.param_groups) == 3
    hold_bounds(optimizer)
    for gradient, expected in ((-1.0, 1.5), (-1.0, 1.5), (1.0, 0.5)):
        model.weight.grad, model.gain.grad = torch.zeros(3, 3), torch.zeros(3)
        optimizer.state.clear()  # a step of Adam is then as long as its rate
        model.scale.grad = torch.full((1,), gradient)
        optimizer.step()
        assert model.scale.item() == pytest.approx(expected, abs=1e-6)


def test_a_frozen_parameter_with_bounds_has_no_group() -> None:
    model = Scaled()
    model.scale.requires_grad_(False)
    optimizer = make_grouped(model)
    assert not any("bounds" in group for group in optimizer.param_groups)
