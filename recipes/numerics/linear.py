"""Matrix products in float32 on a CPU: by oneDNN on processors whose vector units MKL leaves half idle.

MKL takes its AVX-512 kernels on Intel's processors alone. On AMD's that have them (Zen 4 and later) it computes with
AVX2: 102 instead of 234 GFLOP/s in one thread of a Zen 5. torch 2.13 leaves float32 products of training to MKL and
asks oneDNN for lower precisions only; `benchmarks/linear.py` measures both.

Shapes: N rows, K inputs, M outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula
from typing_extensions import override

_ONEDNN = torch.ops.mkldnn._linear_pointwise  # what torch's compiler calls for a linear layer of constant weights
_LEAST_WEIGHTS = 2**14  # of a layer; below, the call costs more than the product saves


def _mkl_takes_half() -> bool:
    """Return whether MKL computes with half the width of this processor's vector units, and oneDNN is there."""
    backends: Any = torch.backends
    if not (backends.mkl.is_available() and backends.mkldnn.is_available()):
        return False
    processor = torch.cpu.get_capabilities()
    return bool(processor["architecture"] == "x86_64" and processor["avx512_f"] and "AMD" in processor["cpu_name"])


ONEDNN_IS_FASTER = _mkl_takes_half()


def get_product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer would multiply a tensor: autocast's, or its own."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, [..., M], as `F.linear` does.

    The factors are those of float32 whichever library multiplies them; sums may be added up in another order.
    `torch.backends.mkldnn.flags(enabled=False)` keeps to MKL, which a second derivative needs.

    Args:
        x: [..., K], any strides.
        weight: [M, K], any strides.
        bias: [M].
    """
    if not _goes_to_onednn(x, weight, num_weights=weight.numel()):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        # as a matrix: oneDNN returns a view of one, and autograd lets no one write into a view made by a Function. Nor
        # is the result a view for autograd, as that of `F.linear` is none: FSDP2 warns of outputs that are
        out: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
        return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], len(weight)])  # type: ignore[no-any-return]
    return _multiply(x, weight, bias)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return grad.T @ x, [M, K]: the gradient of the weight of a linear layer.

    Args:
        grad: Of the layer's output, [N, M].
        x: Its input, [N, K].
    """
    if not _goes_to_onednn(grad, x, num_weights=grad.shape[1] * x.shape[1]):
        return grad.T @ x
    # oneDNN copies the first factor where its rows are not contiguous: the smaller one
    return _multiply(grad.T, x.T) if grad.shape[1] <= x.shape[1] else _multiply(x.T, grad.T).T


class Linear(nn.Linear):
    """torch's linear layer, whose product is that of `linear`."""

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
    out: Tensor = _ONEDNN(x, weight, bias, "none", [], "")
    return out


def _describe_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.recipes.linear(x, weight, bias)
    else:  # oneDNN would copy, where no one counts it
        out = _ONEDNN(x.contiguous(), weight, bias, "none", [], "")
    return out


class _Linear(torch.autograd.Function):
    """Keeps what `F.linear` keeps, and differentiates with the same two products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return _multiply(x, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]
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
    """Register the product as an operator of its own, and the FLOPs of both.

    torch's compiler (2.13) takes oneDNN's for constant weights only.
    """
    if hasattr(torch.ops.recipes, "linear"):
        return  # a process may import this package as `lightning_recipes.recipes`, too
    torch.library.define("recipes::linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    torch.library.impl("recipes::linear", "CPU", _run_product)
    torch.library.register_fake("recipes::linear", _describe_product)
    register_flop_formula([_ONEDNN, torch.ops.recipes.linear])(_count_flops)


_register_operator()
PRODUCTS = (_ONEDNN.default, torch.ops.recipes.linear.default)  # their operators, for who looks for matrix products
