"""Grouped matmul for mixture-of-experts layers: one matrix product per group of rows, in one call.

torch 2.13 has the kernel (`torch._grouped_mm`, a loop on a CPU and for float32), but its fake implementation supports
only bfloat16, so neither torch.compile nor fake tensors accept float32. This module registers a custom operator.

Shapes: E groups, R rows of all groups, K inputs, M outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula
from typing_extensions import override

from recipes.numerics.linear import get_product_dtype


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return x @ weight[e].T for the rows of each group e, [R, M], in the dtype of autocast.

    Does not synchronize with the device. The gradient of a weight without rows is zero.

    Args:
        x: [R, K], rows sorted by group; K a multiple of `expert_shape.ALIGNMENT`.
        weight: [E, M, K]; M a multiple of `expert_shape.ALIGNMENT`.
        ends: [E] int32, one past the last row of each group. Groups may be empty; the last ends at R.
    """
    dtype = get_product_dtype(x)
    out: Tensor = _GroupedLinear.apply(x.to(dtype), weight.to(dtype), ends)
    return out


class GroupedLinear(nn.Module):
    """A linear layer without bias for each group of rows.

    Args:
        num_groups: E.
        in_features: K.
        out_features: M.
    """

    def __init__(self, num_groups: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self._shape = (num_groups, out_features, in_features)
        self.weight = nn.Parameter(torch.empty(self._shape))

    @override
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """[R, K], [E] -> [R, M]"""
        return grouped_linear(x, self.weight, ends)

    @override
    def extra_repr(self) -> str:
        num_groups, out_features, in_features = self._shape
        return f"num_groups={num_groups}, in_features={in_features}, out_features={out_features}"


class _GroupedLinear(torch.autograd.Function):
    """Grouped matmul whose backward pass uses the same operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, ends)
        return _multiply(x, weight.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()  # the gradient of a sum is an expanded view, which the kernel rejects
        return (
            None if weight is None else _multiply(grad, weight, ends),  # [R, K]
            None if x is None else _multiply(grad.T, x, ends),  # [E, M, K]
            None,
        )


def _multiply(x: Tensor, other: Tensor, ends: Tensor) -> Tensor:
    """Return [R, A] @ [E, A, B] -> [R, B], or the sum over the rows of each group, [A, R] @ [R, B] -> [E, A, B]."""
    out: Tensor = torch.ops.recipes.grouped_mm(x, other, ends)
    return out


def _run_product(x: Tensor, other: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, other, offs=ends)


def _describe_product(x: Tensor, other: Tensor, ends: Tensor) -> Tensor:
    num_rows = x.shape[0]  # `len(x)` would fix a number of rows that varies, and compile again for each
    shape = (num_rows, other.shape[2]) if other.ndim == 3 else (ends.shape[0], num_rows, other.shape[1])
    return x.new_empty(shape)


def _count_flops(x_shape: Any, other_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return the FLOPs of all rows; each row is in one group."""
    return 2 * int(x_shape[0]) * int(x_shape[1]) * int(other_shape[-1])


def _register_operator() -> None:
    """Register the operator and its FLOP formula once per process, as in `recipes.numerics.linear`."""
    if hasattr(torch.ops.recipes, "grouped_mm"):
        return
    torch.library.define("recipes::grouped_mm", "(Tensor x, Tensor other, Tensor ends) -> Tensor")
    torch.library.impl("recipes::grouped_mm", ("CPU", "CUDA"), _run_product)
    torch.library.register_fake("recipes::grouped_mm", _describe_product)
    register_flop_formula([torch.ops.recipes.grouped_mm])(_count_flops)


_register_operator()
PRODUCT = torch.ops.recipes.grouped_mm.default  # for code that searches for matmul operators
