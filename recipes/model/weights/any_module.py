"""Weights of a module of any class in one safetensors file, under the names that the module gives them."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.errors import ConfigError
from recipes.foreign_file import reading
from recipes.model.init import named_buffers, named_parameters, without_wrappers

WEIGHTS = "model.safetensors"
_NUM_SHOWN = 3  # names of tensors in an error


def list_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the buffers that a checkpoint holds, by name as without wrappers."""
    saved = {without_wrappers(name) for name in model.state_dict()}
    buffers = {name: buffer for name, buffer in named_buffers(model) if name in saved}
    return dict(named_parameters(model)) | buffers


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write the weights of an unsharded model to `model.safetensors` in a folder."""
    tensors = {  # copies: two may be views of one storage, which the format does not know
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in list_weights(model).items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path, *, setting: str, fix: str) -> None:
    """Fill a model in place from `model.safetensors`, one tensor at a time; each takes the dtype of the model's.

    Args:
        model: Model with storage, on any device.
        folder: Folder with the file.
        setting: What named it, for errors.
        fix: What to type instead.

    Raises:
        ConfigError: The file is damaged, or its names or shapes are not those of the model; nothing was loaded.
    """
    targets, file = list_weights(model), folder / WEIGHTS
    with reading(file, setting, fix), safe_open(file, framework="pt", device="cpu") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - no mapping
        differences = [f"{name} is missing" for name in targets if name not in shapes]
        differences += [f"{name} is unknown" for name in shapes if name not in targets]
        differences += [
            f"{name} is {shapes[name]}, the model's {tuple(target.shape)}"
            for name, target in targets.items()
            if shapes.get(name, tuple(target.shape)) != tuple(target.shape)
        ]
        if differences:
            more = f", and {len(differences) - _NUM_SHOWN} more" if len(differences) > _NUM_SHOWN else ""
            raise ConfigError(setting, f"{file} does not fit: {'; '.join(differences[:_NUM_SHOWN])}{more}", fix)
        for name, target in targets.items():
            target.copy_(opened.get_tensor(name))
