"""Initialize the weights of an adapter, and merge an adapter into its model."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.adapter import is_factor
from recipes.model.init import constant_, fill, generator_for, unsharded_shape
from recipes.model.weights.peft_folder import load_adapter


def has_adapter(model: nn.Module) -> bool:
    """Return whether an adapter has been applied."""
    return hasattr(model, "adapter_config")


@torch.no_grad()
def initialize_adapter(model: nn.Module, seed: int) -> None:
    """Initialize an adapter in place from (seed, name) only; the model output does not change.

    A is uniform in ±1 / sqrt(inputs), as in peft; B is zero; DoRA magnitudes are the row norms of the frozen weight;
    scaling factors are one. If a pretrained peft folder is set, the adapter is loaded from it instead.

    Args:
        model: Model with its final frozen weights, sharded or not.
        seed: Seed of the run.
    """
    pretrained: str | None = getattr(model, "adapter_pretrained", None)
    if pretrained is not None:
        load_adapter(model, pretrained)
        return
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if ".lora_A." in name:
            shape = unsharded_shape(parameter)  # [r, inputs]
            bound = 1 / math.sqrt(shape[1])
            values = torch.empty(shape).uniform_(-bound, bound, generator=generator_for(name, seed=seed))
            fill(parameter, values)
        elif ".lora_B." in name:
            constant_(parameter, 0.0)
        elif is_factor(name):
            constant_(parameter, 1.0)
        elif ".lora_magnitude_vector." in name:
            layer = model.get_submodule(name.partition(".lora_magnitude_vector.")[0])
            fill(parameter, _row_lengths(layer))


def _row_lengths(layer: Any) -> Tensor:
    weight = layer.base_layer.weight.detach()
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight  # collective: every rank must get here
    lengths: Tensor = torch.linalg.vector_norm(whole.T if layer.fan_in_fan_out else whole, dim=1)  # [outputs]
    return lengths


def merge_adapter(model: nn.Module) -> None:
    """Merge an adapter into the base weights of an unsharded model and remove it."""
    for layer in list(model.modules()):
        if hasattr(layer, "base_layer"):
            untyped: Any = layer
            untyped.merge(safe_merge=True)
    remove_adapter(model)


def remove_adapter(model: nn.Module) -> None:
    """Remove an adapter from an unsharded model, whose base weights are then trainable, as before it was applied."""
    for name, layer in list(model.named_modules()):
        if not hasattr(layer, "base_layer"):
            continue
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer.base_layer)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    del model.adapter_config
