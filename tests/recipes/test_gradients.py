"""The gradient norm is that before clipping, by norm, by value or not at all."""

import pytest
import torch
from torch import nn

from recipes.gradients import clip_gradients


def gradients() -> list[nn.Parameter]:
    """Two parameters whose gradients have the norm 13 together."""
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
    return parameters


def test_clipping_by_norm_gives_the_norm_before_and_leaves_one_after() -> None:
    parameters = gradients()
    norm = clip_gradients(parameters, max_norm=1.0, max_value=None)
    assert norm.item() == 13.0
    assert nn.utils.get_total_norm([p.grad for p in parameters]).item() == pytest.approx(1.0)


def test_clipping_by_value_gives_the_norm_before_too() -> None:
    parameters = gradients()
    norm = clip_gradients(parameters, max_norm=None, max_value=5.0)
    assert norm.item() == 13.0
    assert [p.grad.tolist() for p in parameters] == [[3.0, 4.0], [5.0]]


def test_without_clipping_the_norm_is_measured_and_nothing_changes() -> None:
    parameters = gradients()
    norm = clip_gradients(parameters, max_norm=None, max_value=None)
    assert norm.item() == 13.0
    assert parameters[1].grad.tolist() == [12.0]
