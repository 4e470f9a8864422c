"""First weights of an adapter, and a model with its adapter merged into it."""

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
    """Set the weights of an adapter in place, from (seed, name) alone; the model computes what it did without.

    A is uniform within 1 / sqrt(inputs), as peft draws it, B is zero, lengths of rows are those of the frozen weight,
    factors are one. An adapter that goes on from a folder of peft has the weights that are there.

    Args:
        model: With the frozen weights it will have, sharded or not.
        seed: Of the run.
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
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight  # a collective: every rank is here
    lengths: Tensor = torch.linalg.vector_norm(whole.T if layer.fan_in_fan_out else whole, dim=1)  # [outputs]
    return lengths


def merge_adapter(model: nn.Module) -> None:
    """Add an adapter to the weights that it stands beside, and remove it; the model is not sharded."""
    for name, layer in list(model.named_modules()):
        if not hasattr(layer, "base_layer"):
            continue
        layer.merge(safe_merge=True)  # type: ignore[operator]
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer.base_layer)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    del model.adapter_config
