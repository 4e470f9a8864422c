"""Adafactor against torch's where torch's is right, and on shards, where torch's is not."""

import copy
from typing import Any

import pytest
import torch
from thread_ranks import LAYOUTS, Net, run_on_threads, train
from torch import nn

from recipes.optimizer.adafactor import Adafactor

EPS = torch.finfo(torch.float32).eps  # torch's default


def make(model: nn.Module) -> Adafactor:
    return Adafactor(model, lr=0.1, beta2_decay=-0.8, eps=(EPS, 1e-3), clip_threshold=1.0, weight_decay=0.1)


def test_on_one_device_it_is_torchs() -> None:
    """All but kernels: torch factors the last two axes of a convolution, this one the rows of a matrix."""
    model = Net()
    for layer in model.blocks:
        del layer.conv
    other = copy.deepcopy(model)
    decayed = [parameter for parameter in other.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in other.parameters() if parameter.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    ours, theirs = make(model), torch.optim.Adafactor(groups, lr=0.1)
    for _ in range(5):
        for one, another in zip(model.parameters(), other.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            another.grad = one.grad.clone()
        ours.step()
        theirs.step()
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-6)  # sums of squares in another order


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_and_replicas_give_the_weights_of_one_device(layout: str) -> None:
    expected, _ = train(make)
    ranks = run_on_threads(lambda rank: train(make, layout)[0])
    for found in ranks:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # as above
        assert all(torch.equal(one, other) for one, other in zip(found, ranks[0], strict=True))


def test_every_rank_keeps_the_statistics_of_whole_matrices_and_its_part_of_vectors() -> None:
    _, alone = train(make)
    for _, optimizer in run_on_threads(lambda rank: train(make, "fsdp")):
        for state, other in zip(optimizer.state.values(), alone.state.values(), strict=True):
            assert state["step"] == other["step"] == 3
            if "variance" in state:
                assert state["variance"].shape == other["variance"].shape
                continue
            for name in ("row_var", "col_var"):
                torch.testing.assert_close(state[name], other[name], rtol=1e-5, atol=1e-9)


def test_a_matrix_needs_one_number_per_row_and_column() -> None:
    _, optimizer = train(make)
    shapes = {
        tuple(parameter.shape): [tuple(value.shape) for value in state.values() if torch.is_tensor(value)]
        for parameter, state in optimizer.state.items()
    }
    assert shapes[10, 6] == [(10,), (6,)]
    assert shapes[5, 2, 3, 3] == [(5,), (18,)]
    assert shapes[10,] == [(10,)]


def test_a_step_without_gradients_changes_nothing() -> None:
    expected, _ = train(make, num_steps=1)
    found, optimizer = train(make, num_steps=2, skips=1)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert {state["step"] for state in optimizer.state.values()} == {1}


def test_statistics_of_bfloat16_weights_are_float32() -> None:
    model = Net().bfloat16()
    optimizer = make(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert {value.dtype for value in kept} == {torch.float32}
