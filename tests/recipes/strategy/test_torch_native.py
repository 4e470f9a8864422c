"""The reported gradient norm is that before clipping, by norm, by value or not at all."""

from typing import Any

import pytest
import torch
from torch import nn

from recipes.strategy.torch_native import clip_gradients, global_norm


def gradients() -> list[nn.Parameter]:
    """Return two parameters whose gradients together have the norm 13."""
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
    return parameters


def test_clipping_to_norm_one_returns_the_norm_before() -> None:
    parameters = gradients()
    norm, limit = clip_gradients(parameters, max_norm=1.0, max_value=None)
    assert float(limit) == 1.0
    assert norm.item() == 13.0
    assert nn.utils.get_total_norm([p.grad for p in parameters]).item() == pytest.approx(1.0)


def test_clipping_by_value_returns_the_norm_before_too() -> None:
    parameters = gradients()
    norm, _ = clip_gradients(parameters, max_norm=None, max_value=5.0)
    assert norm.item() == 13.0
    assert [p.grad.tolist() for p in parameters] == [[3.0, 4.0], [5.0]]


def test_without_clipping_the_norm_is_measured_and_nothing_changes() -> None:
    parameters = gradients()
    norm, _ = clip_gradients(parameters, max_norm=None, max_value=None)
    assert norm.item() == 13.0
    assert parameters[1].grad.tolist() == [12.0]


@pytest.mark.parametrize("num_elements", [1, 4095, 4097, 5_000_000])
def test_the_norm_is_exact_to_float32_whatever_the_size(num_elements: int) -> None:
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    exact = values.double().norm().item()
    assert global_norm([values]).item() == pytest.approx(exact, rel=2e-7)
    halves = list(values.split(num_elements // 2 + 1))
    assert global_norm(halves).item() == pytest.approx(exact, rel=2e-7)


def test_torch_still_loses_digits_of_a_long_norm_on_a_cpu() -> None:
    """Why `global_norm` adds in chunks: fails once torch has fixed it."""
    values = torch.randn(5_000_000, generator=torch.Generator().manual_seed(0))
    exact = values.double().norm().item()
    assert abs(torch.linalg.vector_norm(values).item() / exact - 1) > 1e-5


def test_the_norm_of_a_nan_gradient_is_inf() -> None:
    parameters = gradients()
    assert parameters[0].grad is not None
    parameters[0].grad[0] = float("nan")
    assert clip_gradients(parameters, max_norm=None, max_value=None)[0].item() == float("inf")


def test_an_adaptive_limit_scales_gradients_as_the_fixed_one_does() -> None:
    class Half:
        """Limits every norm to half of itself."""

        def limit(self, norm: torch.Tensor) -> torch.Tensor:
            return norm / 2

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 2.0)
    norm, limit = clip_gradients(parameters, max_norm=10.0, max_value=None, clipping=Half())
    assert float(limit) == float(norm) / 2
    for parameter in parameters:
        assert parameter.grad is not None
        # torch adds 1e-6 to the norm it divides by
        torch.testing.assert_close(parameter.grad, torch.ones(3), rtol=1e-6, atol=0)
