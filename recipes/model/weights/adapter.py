"""First weights of an adapter, and a model with its adapter merged into it."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.adapter import is_adapter, is_factor
from recipes.errors import ConfigError
from recipes.model.init import constant_, fill, generator_for, unsharded_shape


def has_adapter(model: nn.Module) -> bool:
    """Return whether an adapter has been applied."""
    return hasattr(model, "adapter_config")


@torch.no_grad()
def initialize_adapter(model: nn.Module, seed: int) -> None:
    """Set the weights of an adapter in place, from (seed, name) alone; the model computes what it did without.

    A is uniform within 1 / sqrt(inputs), as peft draws it, B is zero, lengths of rows are those of the frozen weight,
    factors are one.

    Args:
        model: With the frozen weights it will have, sharded or not.
        seed: Of the run.
    """
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


def save_adapter(model: Any, folder: Path) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` loads beside the published model.

    Args:
        model: A HuggingFace with an adapter, not sharded.
        folder: Created if necessary.

    Raises:
        ConfigError: The layers of the model have other names than the published ones.
    """
    from safetensors.torch import save_file

    if not hasattr(model, "inner"):
        reason = f"{type(model).__name__} has other layers than the published model, so its adapter fits nothing else"
        raise ConfigError("mode.adapter=separate", reason, "mode.adapter=merged, or a run of model=huggingface")
    if model.pretrained is None:
        reason = "the weights beside the adapter were drawn from the seed, and are published nowhere"
        raise ConfigError("mode.adapter=separate", reason, "mode.adapter=merged")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name.removeprefix('inner.').replace('.default', '')}": parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    }
    # peft drops the name of the adapter, and the `weight` of a vector of lengths with it
    tensors = {name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): t for name, t in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.adapter_config
    config.base_model_name_or_path = model.pretrained
    config.target_modules = {name.removeprefix("inner.") for name in config.target_modules}
    if getattr(config, "feedforward_modules", None):
        config.feedforward_modules = {name.removeprefix("inner.") for name in config.feedforward_modules}
    config.task_type = "CAUSAL_LM"
    config.save_pretrained(str(folder))
