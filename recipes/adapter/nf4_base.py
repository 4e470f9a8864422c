"""Frozen base weights of an adapter in 4 bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314)."""

import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from recipes.blocks import list_adapted_blocks
from recipes.errors import ConfigError, type_extra
from recipes.numerics.linear import Linear
from recipes.numerics.nf4 import BLOCK, NF4Linear, dequantize, list_nf4, num_bytes


def hold_in_nf4(model: nn.Module) -> None:
    """Convert the frozen linear layers in the blocks that are adapted to NF4 in place, with undefined values.

    Embeddings, norms and the head are unchanged. So are layers whose number of inputs is not a multiple of 64, and the
    `Conv1D` layers of GPT-2 in transformers, whose weights are transposed.

    Args:
        model: Model with an adapter, usually on the meta device.

    Raises:
        ConfigError: torchao is not installed, or no layer can be converted.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError("adapter.quantization=nf4", "torchao is not installed", type_extra("fp8"))
    layers = [layer for block in list_adapted_blocks(model) for layer in _find_layers(block)]
    if not layers:
        reason = f"{type(model).__name__} has no linear layer whose inputs divide into blocks of {BLOCK}"
        raise ConfigError("adapter.quantization=nf4", reason, "adapter=lora")
    for layer in layers:
        NF4Linear.convert(layer)


def _find_layers(block: nn.Module) -> Iterator[nn.Linear]:
    """Yield frozen linear layers of torch and of this project, excluding adapter matrices."""
    for module in block.modules():
        if isinstance(module, nn.Linear) and type(module) in (nn.Linear, Linear):
            is_trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
            if not is_trained and module.in_features % BLOCK == 0:
                yield module


def unquantize(model: nn.Module) -> list[tuple[nn.Linear, Tensor]]:
    """Replace NF4 weights in place by weights in the dtype of the run, with undefined values.

    Returns:
        The layers with their former NF4 weights.
    """
    layers: list[tuple[nn.Linear, Tensor]] = [
        (module, module.weight) for module in model.modules() if isinstance(module, NF4Linear)
    ]
    for layer, weight in layers:
        whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)  # [M, K]
        layer.weight = nn.Parameter(whole, requires_grad=False)
        layer.__class__ = Linear
    return layers


@torch.no_grad()
def dequantize_base(model: nn.Module) -> None:
    """Replace NF4 weights in place by the values that they stand for, in the dtype of the run."""
    for layer, rounded in unquantize(model):
        layer.weight.copy_(dequantize(rounded))


def describe_base(model: nn.Module) -> str | None:
    """Describe the number of weights in NF4 and their size in bytes over all ranks; None if there are none."""
    weights = [weight for _, weight in list_nf4(model)]
    if not weights:
        return None
    num_weights = sum(weight.numel() for weight in weights)
    num_frozen = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    before = sum(weight.numel() * weight.dtype.itemsize for weight in weights) / 2**20
    after = sum(num_bytes(*weight.shape) for weight in weights) / 2**20
    return f"{num_weights:,} of {num_frozen:,} frozen weights in NF4, {after:,.1f} instead of {before:,.1f} MiB"
