"""A skipped step changes nothing, for optimizers that read the flag themselves and for those that do not."""

import copy
from typing import Any

import pytest
import torch

from recipes.strategy import skip_step


def optimizers(weight: torch.nn.Parameter) -> dict[str, torch.optim.Optimizer]:
    return {
        "fused AdamW": torch.optim.AdamW([weight], lr=0.1, fused=True),
        "AdamW": torch.optim.AdamW([weight], lr=0.1),
        "fused SGD": torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True),
        "SGD": torch.optim.SGD([weight], lr=0.1, momentum=0.9),
    }


def get_state(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> list[Any]:
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return [
        weight.detach().clone(),
        *(value for values in state.values() for value in values.values()),
    ]


@pytest.mark.parametrize("name", ["fused AdamW", "AdamW", "fused SGD", "SGD"])
def test_a_skipped_step_changes_nothing_and_the_next_one_does(name: str) -> None:
    weight = torch.nn.Parameter(torch.randn(5))
    optimizer = optimizers(weight)[name]
    weight.grad = torch.randn(5)
    optimizer.step()
    before = get_state(optimizer, weight)
    weight.grad = torch.full((5,), torch.inf)
    skip_step(optimizer, [weight], torch.tensor(True))
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, get_state(optimizer, weight), strict=True))
    weight.grad = torch.randn(5)
    skip_step(optimizer, [weight], torch.tensor(False))
    optimizer.step()
    assert not torch.equal(before[0], weight.detach())


@pytest.mark.parametrize("name", ["fused AdamW", "fused SGD"])
def test_a_fused_kernel_obeys_the_flag_set_on_the_optimizer(name: str) -> None:
    """On a GPU the flag is never read on the host; the CPU kernel obeys it in the same way."""
    weight = torch.nn.Parameter(torch.randn(5))
    optimizer = optimizers(weight)[name]
    weight.grad = torch.randn(5)
    optimizer.step()
    before = get_state(optimizer, weight)
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    weight.grad = torch.full((5,), torch.inf)
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, get_state(optimizer, weight), strict=True))
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    weight.grad = torch.randn(5)
    optimizer.step()
    assert not torch.equal(before[0], weight.detach())
