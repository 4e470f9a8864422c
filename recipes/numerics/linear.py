"""Linear layer that uses oneDNN for float32 matmuls on AMD CPUs with AVX-512, where MKL is slower.

MKL uses its AVX-512 kernels only on Intel processors. On AMD processors with AVX-512 (Zen 4 and later) it uses AVX2:
102 instead of 234 GFLOP/s in one thread of a Zen 5. torch 2.13 runs float32 matmuls in training with MKL and uses
oneDNN only for lower precisions; `benchmarks/linear.py` measures both.

Shapes: N rows, K inputs, M outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula
from typing_extensions import override

from recipes.torch_internals import ONEDNN_LINEAR

_LEAST_WEIGHTS = 2**14  # weights of a layer, below which the call overhead exceeds the savings


def _mkl_takes_half() -> bool:
    """Return whether MKL would use only half the vector width of this processor, and oneDNN is available."""
    backends: Any = torch.backends
    if not (backends.mkl.is_available() and backends.mkldnn.is_available()):
        return False
    processor = torch.cpu.get_capabilities()
    return bool(processor["architecture"] == "x86_64" and processor["avx512_f"] and "AMD" in processor["cpu_name"])


ONEDNN_IS_FASTER = _mkl_takes_half()


def get_product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer would multiply a tensor: that of autocast, or its own."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, [..., M], as `F.linear` does.

    Both libraries compute in float32, but may sum in a different order. `torch.backends.mkldnn.flags(enabled=False)`
    forces MKL, which second derivatives need.

    Args:
        x: [..., K], any strides.
        weight: [M, K], any strides.
        bias: [M].
    """
    if not _goes_to_onednn(x, weight, num_weights=weight.numel()):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        # as a matrix: oneDNN would return a view, and autograd forbids in-place changes of a view made by a Function.
        # `_unsafe_view`, because FSDP2 warns about outputs that are views; that of `F.linear` is not
        out: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias)
        viewed: Tensor = torch.ops.aten._unsafe_view(out, [*x.shape[:-1], len(weight)])
        return viewed
    return _multiply(x, weight, bias)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the weight gradient of a linear layer, grad.T @ x, [M, K].

    Args:
        grad: Gradient of the output, [N, M].
        x: Input, [N, K].
    """
    if not _goes_to_onednn(grad, x, num_weights=grad.shape[1] * x.shape[1]):
        return grad.T @ x
    # oneDNN copies the first factor if its rows are not contiguous, so make it the smaller one
    return _multiply(grad.T, x.T) if grad.shape[1] <= x.shape[1] else _multiply(x.T, grad.T).T


class Linear(nn.Linear):
    """torch's linear layer, computed by `linear`."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def _goes_to_onednn(one: Tensor, other: Tensor, *, num_weights: int) -> bool:
    return bool(
        ONEDNN_IS_FASTER
        and one.device.type == "cpu"
        and one.dtype == other.dtype == torch.float32
        and num_weights >= _LEAST_WEIGHTS
        and one.ndim >= 2
        and one.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
    )


def _run_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = ONEDNN_LINEAR(x, weight, bias, "none", [], "")
    return out


def _describe_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.recipes.linear(x, weight, bias)
    else:  # explicit copy: oneDNN would make it internally, where it is not counted
        out = ONEDNN_LINEAR(x.contiguous(), weight, bias, "none", [], "")
    return out


class _Linear(torch.autograd.Function):
    """Saves the same tensors as `F.linear` and has the same backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return _multiply(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (
            None if weight is None else _multiply(grad, weight.T),  # [N, K]
            None if x is None else weight_gradient(grad, x),  # [M, K]
            grad.sum(0) if ctx.needs_input_grad[2] else None,  # [M]
        )


def _count_flops(x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    num_outputs, num_inputs = weight_shape
    return 2 * torch.Size(x_shape).numel() * int(num_outputs) * int(num_inputs) // int(x_shape[-1])


def _register_operator() -> None:
    """Register a custom operator, because torch.compile (2.13) accepts that of oneDNN only for constant weights.

    Also register the FLOP formula of both.
    """
    torch.library.define("recipes::linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    torch.library.impl("recipes::linear", "CPU", _run_product)
    torch.library.register_fake("recipes::linear", _describe_product)
    register_flop_formula([ONEDNN_LINEAR, torch.ops.recipes.linear])(_count_flops)


_register_operator()
PRODUCTS = (ONEDNN_LINEAR.default, torch.ops.recipes.linear.default)  # for code that searches for matmul operators
