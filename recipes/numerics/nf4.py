"""4-bit NormalFloat (Dettmers et al. 2023, arXiv 2305.14314): 16 values, one scale per 64 weights.

Codes, scales and dequantized weights equal those of bitsandbytes without double quantization, bit for bit. They are
stored in torchao's `NF4Tensor`, because FSDP2 can shard it, but computed here: torchao's `to_nf4` (0.18) has values
with 4 decimals, and always rounds the scales to 8 bits, which saves 0.05 bytes per weight.

Shapes: M outputs and K inputs of a linear layer, K a multiple of 64.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from recipes.numerics.linear import get_product_dtype, linear
from recipes.numerics.torchao_import import without_warnings_of_torchao
from recipes.torch_internals import compute_local_shape_and_global_offset

BLOCK = 64  # weights that share a scale
# means of 16 equally probable slices of a normal distribution, divided by the largest, including zero (appendix E)
VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_LEAST_SCALE = 1e-38  # avoids division by the scale 0 of an all-zero block
# inner tensors of torchao's NF4Tensor
_CODES, _SCALES, _FACTORS, _MEAN, _VALUES = _PARTS = (
    "quantized_data",  # [M K / 2] uint8, two codes a byte, the first in its upper half
    "quantized_scalers",  # [M K / 64] float32; 8 bits in torchao's own, which divides them by
    "quantization_factor",  # [M] float32, one for the scales of a row: 1
    "scaler_mean",  # [1] float32, and adds: 0
    "nf4",  # [16] float32
)


def is_nf4(tensor: Tensor) -> bool:
    """Return whether a tensor is in NF4, or is a shard of an NF4 tensor."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return type(local).__name__ == "NF4Tensor"  # by name: torchao takes a second to import


def get_parts(tensor: Tensor) -> list[Tensor]:
    """Return the local plain tensors behind a tensor: five in NF4, otherwise one."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return [getattr(local, name) for name in _PARTS] if is_nf4(local) else [local]


def num_bytes(num_rows: int, num_columns: int) -> int:
    """Return the size of an NF4 matrix in bytes: 0.5625 per weight, plus 4 per row."""
    return num_rows * num_columns // 2 + num_rows * num_columns // BLOCK * 4 + num_rows * 4


def empty_nf4(weight: Tensor) -> Tensor:
    """Return an NF4Tensor of the shape, dtype and device of `weight`, with undefined values.

    The dtype is nominal: the stored data does not depend on it.

    Args:
        weight: [M, K], any device, including meta.
    """
    num_rows, num_columns = weight.shape
    num_blocks = num_rows * num_columns // BLOCK
    sizes = {_CODES: num_rows * num_columns // 2, _SCALES: num_blocks, _FACTORS: num_rows, _MEAN: 1, _VALUES: 16}
    parts = {
        name: torch.empty(size, dtype=torch.uint8 if name == _CODES else torch.float32, device=weight.device)
        for name, size in sizes.items()
    }
    return _assemble(weight, parts)


def _assemble(like: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """Return an NF4Tensor from its inner tensors, with the shape and dtype of `like`."""
    with without_warnings_of_torchao():
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, SubclassTensorArgs
    num_rows, num_columns = like.shape
    described = SubclassTensorArgs(like.shape, (num_columns, 1), 0, like.dtype, parts[_CODES].device, False)
    tensor: Tensor = NF4Tensor(
        described,
        block_size=BLOCK,
        n_blocks=num_rows * num_columns // BLOCK,
        scaler_block_size=num_columns // BLOCK,  # scales per row, so that a shard of whole rows has whole blocks
        **parts,
    )
    return tensor


@torch.no_grad()
def fill_nf4(parameter: Tensor, values: Tensor) -> None:
    """Quantize `values` into `parameter`, or this rank's rows into its shard; no collectives.

    Args:
        parameter: NF4 parameter, [M, K], sharded by rows or not.
        values: [M, K], unsharded, any floating dtype, on any device.
    """
    if isinstance(parameter, DTensor):
        (num_rows, _), (start, _) = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        values = values[start : start + num_rows]
    codes, scales = quantize(values)
    local: Any = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    filled = {_CODES: codes, _SCALES: scales, _VALUES: torch.tensor(VALUES)}
    for name, part in filled.items():
        getattr(local, name).copy_(part)
    getattr(local, _FACTORS).fill_(1.0)
    getattr(local, _MEAN).fill_(0.0)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest codes, [M K / 2] uint8, two a byte, and the scales, [M K / 64] float32.

    Args:
        values: [M, K], any floating dtype.
    """
    blocks = values.float().reshape(-1, BLOCK)  # [M K / 64, 64]
    scales = blocks.abs().amax(dim=1)  # [M K / 64]
    table = torch.tensor(VALUES, device=values.device)  # [16] float32
    middles = (table[:-1] + table[1:]) / 2  # [15]
    # multiply by the reciprocal instead of dividing, to round as bitsandbytes does
    fractions = blocks * (1.0 / scales.clamp(min=_LEAST_SCALE))[:, None]  # [M K / 64, 64]
    indices = torch.bucketize(fractions, middles, out_int32=True).to(torch.uint8).view(-1, 2)  # [M K / 2, 2]
    return indices[:, 0] << 4 | indices[:, 1], scales


def dequantize(weight: Tensor) -> Tensor:
    """Return an unsharded weight in float32, [M, K]."""
    return _look_up(*_get_operands(weight)).view(weight.shape)


def _get_operands(weight: Any) -> tuple[Tensor, Tensor, Tensor]:
    return weight.quantized_data, weight.quantized_scalers, weight.nf4


def _look_up(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Dequantize to [M K / 64, 64] float32."""
    pairs = torch.cartesian_prod(table, table)  # [256, 2]: both values of each byte, in one look-up
    return F.embedding(codes.int(), pairs).view(-1, BLOCK) * scales[:, None]


class NF4Linear(nn.Linear):
    """A linear layer with a frozen weight in NF4, dequantized for each matmul.

    `F.linear` dispatches to torchao (0.18), which ignores autocast: float32 inputs would be multiplied in float32.
    """

    @staticmethod
    def convert(layer: nn.Linear) -> None:
        """Convert a frozen layer to an NF4 weight in place, with undefined values."""
        assert not any(parameter.requires_grad for parameter in layer.parameters(recurse=False)), layer
        layer.weight = nn.Parameter(empty_nf4(layer.weight), requires_grad=False)
        layer.__class__ = NF4Linear

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs [..., M] of inputs [..., K], in the compute dtype."""
        dtype = get_product_dtype(input)
        bias = None if self.bias is None else self.bias.to(dtype)
        out: Tensor = _Product.apply(input.to(dtype), *_get_operands(self.weight), bias)
        return out

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "NF4Linear":
        """Move the weight without converting it; torchao (0.18) would dequantize it if its dtype is set."""
        weight = self.weight
        self._parameters["weight"] = None  # torch skips None, and the key keeps its place
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["weight"] = _move(weight, fn)
        return self


def _move(weight: Any, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """Apply the function of `Module.to` or `to_empty` to each inner tensor, viewed as bytes to keep its dtype."""
    local: Any = weight._local_tensor if isinstance(weight, DTensor) else weight
    with torch.no_grad():
        if fn(local.quantized_data) is local.quantized_data:
            same: nn.Parameter = weight
            return same
        parts = {name: getattr(local, name) for name in _PARTS}
        moved = {name: fn(part.view(torch.uint8)).view(part.dtype) for name, part in parts.items()}
        tensor = _assemble(local, moved)
        if isinstance(weight, DTensor):
            # `DTensor.from_local` would move a shard in host memory to the device of the mesh
            tensor = DTensor(tensor, weight._spec, requires_grad=False)
    return nn.Parameter(tensor, requires_grad=False)


class _Product(torch.autograd.Function):
    """Saves codes and scales for the backward pass instead of the dequantized weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scales, table)
        return linear(x, _look_up(codes, scales, table).view(-1, x.shape[-1]).to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = _look_up(*ctx.saved_tensors).view(grad.shape[-1], -1).to(grad.dtype)  # [M, K]
        return linear(grad, weight.T), None, None, None, None


def list_nf4(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the NF4 parameters with their names."""
    yield from ((name, parameter) for name, parameter in model.named_parameters() if is_nf4(parameter))
