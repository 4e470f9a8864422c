"""The product of groups of rows against one product for each group."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from recipes.numerics.grouped_linear import GroupedLinear, grouped_linear

ENDS = torch.tensor([7, 7, 30, 40], dtype=torch.int32)  # the second group is empty


def loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    starts = [0, *ends.tolist()]
    return torch.cat([x[start:end] @ each.T for start, end, each in zip(starts, ends.tolist(), weight, strict=False)])


def factors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((40, 64), (4, 48, 64)))
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_have_the_bits_of_a_loop(dtype: torch.dtype) -> None:
    x, weight = factors(dtype)
    found, expected = grouped_linear(x, weight, ENDS), loop(x, weight, ENDS)
    assert torch.equal(found, expected)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for gradient, other in zip(
        torch.autograd.grad(found, (x, weight), direction),
        torch.autograd.grad(expected, (x, weight), direction),
        strict=True,
    ):
        assert torch.equal(gradient, other)


def test_the_weight_of_an_empty_group_has_a_gradient_of_zero() -> None:
    x, weight = factors()
    grouped_linear(x, weight, ENDS).sum().backward()  # its gradient is expanded, which torch's product refuses
    assert weight.grad is not None
    assert weight.grad.abs().amax(dim=(1, 2)).bool().tolist() == [True, False, True, True]


def test_autocast_rounds_both_factors_and_returns_its_dtype() -> None:
    x, weight = factors()
    with torch.autocast("cpu", torch.bfloat16):
        found = grouped_linear(x, weight, ENDS)
    assert torch.equal(found, loop(x.bfloat16(), weight.bfloat16(), ENDS))


def test_shapes_are_known_without_values_in_float32_too() -> None:
    with torch.device("meta"):
        layer = GroupedLinear(4, 64, 48)
        x, ends = torch.empty(40, 64, requires_grad=True), torch.empty(4, dtype=torch.int32)
    out = layer(x, ends)
    out.sum().backward()
    assert (out.shape, x.grad.shape, layer.weight.grad.shape) == ((40, 48), (40, 64), (4, 48, 64))


def test_every_row_is_multiplied_once_in_each_of_three_products() -> None:
    x, weight = factors()
    with FlopCounterMode(display=False) as counter:
        grouped_linear(x, weight, ENDS).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 40 * 64 * 48


def test_compiled_it_has_the_same_bits() -> None:
    x, weight = factors()
    compiled = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, weight, ENDS), grouped_linear(x, weight, ENDS))
