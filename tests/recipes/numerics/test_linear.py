"""Products of oneDNN are those of torch's linear layer; only float32 on a CPU that MKL does not fill goes there."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from recipes.numerics import linear as module
from recipes.numerics.linear import Linear, linear, weight_gradient

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def _onednn_on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONEDNN_IS_FASTER", True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the weights that went to oneDNN."""
    found = []
    multiply = module._multiply

    def note(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append(tuple(weight.shape))
        return multiply(x, weight, bias)

    monkeypatch.setattr(module, "_multiply", note)
    return found


def _differentiate(product: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (x, weight, bias) if leaf is not None]
    out = product(*leaves)
    out.backward(torch.ones_like(out).cumsum(-1) / out.shape[-1])
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(128, 384), (512, 128), (160, 257)])
def test_output_and_gradients_are_as_exact_as_torchs(num_inputs: int, num_outputs: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 40, num_inputs)
    weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs) if has_bias else None
    doubles = [None if each is None else each.double() for each in (x, weight, bias)]
    exact = _differentiate(F.linear, *doubles)  # type: ignore[arg-type]
    ours, torchs = (_differentiate(product, x, weight, bias) for product in (linear, F.linear))
    assert len(ours) == len(exact) == 3 + has_bias
    for one, other, reference in zip(ours, torchs, exact, strict=True):
        errors = [float((each.double() - reference).abs().max()) for each in (one, other)]
        # sums of up to 512 addends in another order: the largest of thousands of errors differs by less than this
        assert errors[0] <= 3 * errors[1]


def test_what_comes_out_may_be_written_into_outside_of_autograd() -> None:
    torch.manual_seed(0)
    layer, x = Linear(128, 384, bias=False), torch.randn(3, 40, 128)
    grads = []
    for product in (layer, lambda x: F.linear(x, layer.weight)):
        out = product(x)
        assert not out._is_view(), "FSDP2 warns of outputs that are views"
        with torch.no_grad():  # as the padding of a vocabulary is
            out[..., 300:].fill_(float("-inf"))
        layer.zero_grad()
        out.logsumexp(-1).sum().backward()
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad.clone())
    # float32 sums in another order
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


def test_every_product_of_a_step_goes_to_onednn_and_none_of_frozen_weights(calls: list[tuple[int, ...]]) -> None:
    layer = Linear(128, 256)
    layer(torch.randn(5, 128, requires_grad=True)).sum().backward()
    assert calls == [(256, 128), (128, 256), (256, 5)]  # output, gradient of the input, of the weight
    calls.clear()
    layer.requires_grad_(False)
    layer(torch.randn(5, 128, requires_grad=True)).sum().backward()
    assert calls == [(256, 128), (128, 256)]
    calls.clear()
    layer.weight.requires_grad_(True)
    layer(torch.randn(5, 128)).sum().backward()
    assert calls == [(256, 128), (256, 5)]


def test_the_gradient_of_a_weight_copies_the_smaller_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    multiply = module._multiply
    monkeypatch.setattr(module, "_multiply", lambda x, weight: copied.append(x.numel()) or multiply(x, weight))
    wide, narrow = torch.randn(200, 1024), torch.randn(200, 128)
    for grad, x in ((wide, narrow), (narrow, wide)):
        torch.testing.assert_close(weight_gradient(grad, x), grad.T @ x, rtol=1e-5, atol=2e-4)
    assert copied == [narrow.numel(), narrow.numel()]


@pytest.mark.parametrize("case", ["bfloat16", "float64", "autocast", "small", "switched off", "MKL is as fast"])
def test_anything_else_is_torchs_own_product_bit_for_bit(
    case: str, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(case, torch.float32)
    width = 64 if case == "small" else 256
    x, weight = torch.randn(7, width, dtype=dtype), torch.randn(width, width, dtype=dtype)
    monkeypatch.setattr(module, "ONEDNN_IS_FASTER", case != "MKL is as fast")
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"),
        torch.backends.mkldnn.flags(enabled=case != "switched off"),
    ):
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert calls == []


def test_a_compiled_layer_is_one_graph_with_the_same_results() -> None:
    torch.manual_seed(0)
    layer, x = Linear(128, 192), torch.randn(4, 8, 128, requires_grad=True)
    found = []
    for forward in (layer, torch.compile(layer, fullgraph=True)):
        x.grad = layer.weight.grad = None
        out = forward(x)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, layer.weight.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_flops_are_counted_as_those_of_torchs_layer() -> None:
    counts = []
    for product in (linear, F.linear):
        with FlopCounterMode(display=False) as counter:
            _differentiate(product, torch.randn(3, 40, 128), torch.randn(192, 128), torch.randn(192))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * 120 * 128 * 192


@pytest.mark.parametrize(
    ("name", "avx512", "expected"),
    [("AMD EPYC 9654", True, True), ("AMD EPYC 7763", False, False), ("Intel Xeon Platinum 8480+", True, False)],
)
def test_onednn_is_chosen_for_amd_processors_with_avx512(
    name: str, avx512: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = {"architecture": "x86_64", "avx512_f": avx512, "cpu_name": name}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert module._mkl_takes_half() is expected
