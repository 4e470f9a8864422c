"""Lion against its formula, and on shards and replicas as on one device."""

from typing import Any

import pytest
import torch
from thread_ranks import LAYOUTS, Net, run_on_threads, train
from torch import nn

from recipes.optimizer.lion import Lion


def make(model: nn.Module) -> Lion:
    return Lion(model, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.3)


def test_three_steps_follow_the_formula_of_the_paper() -> None:
    expected = [parameter.detach().clone() for parameter in Net().parameters()]
    momenta = [torch.zeros_like(parameter) for parameter in expected]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for weight, momentum in zip(expected, momenta, strict=True):
            grad = torch.randn(weight.shape, generator=generator)
            direction = (0.9 * momentum + 0.1 * grad).sign()
            decay = 0.3 if weight.ndim >= 2 else 0.0
            weight -= 1e-2 * (direction + decay * weight)
            momentum.mul_(0.99).add_(grad, alpha=0.01)
    found, optimizer = train(make)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)  # float32, in another order
    kept = [list(state) for state in optimizer.state.values()]
    assert kept == [["exp_avg"]] * len(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_and_replicas_give_the_bits_of_one_device(layout: str) -> None:
    expected, _ = train(make)
    for found, _ in run_on_threads(lambda rank: train(make, layout)):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_step_without_gradients_changes_nothing() -> None:
    expected, _ = train(make, num_steps=1)
    found, _ = train(make, num_steps=2, skips=1)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_closure_computes_the_gradients_of_the_step() -> None:
    model = Net()
    optimizer: Any = make(model)

    def closure() -> Any:
        loss = model.embedding.weight.square().sum()
        loss.backward()
        return loss

    before = model.embedding.weight.detach().clone()
    assert optimizer.step(closure) == before.square().sum()
    assert not torch.equal(model.embedding.weight, before)
