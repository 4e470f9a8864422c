"""Load torchvision's ResNet weights into our models, without torchvision."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from recipes.errors import ConfigError
from recipes.model.init import fill
from recipes.model.resnet import ResNet

_BLOCK = re.compile(r"layer([1-4])\.(\d+)\.(.+)")
_PREFIXES = (  # outside the blocks: our prefix, torchvision's prefix
    ("stem_conv.", "conv1."),
    ("stem_norm.", "bn1."),
    ("head.", "fc."),
)


def our_name(name: str, model: ResNet) -> str:
    """Map a torchvision name to ours: `layer2.0.downsample.1.bias` of ResNet-18 to `blocks.2.shortcut.1.bias`."""
    if match := _BLOCK.fullmatch(name):
        stage, index, rest = int(match[1]) - 1, int(match[2]), match[3]
        if index >= model.STAGE_BLOCKS[stage]:
            return name  # of a deeper ResNet
        rest = rest.replace("bn", "norm").replace("downsample", "shortcut")
        return f"blocks.{model.find_block(stage, index)}.{rest}"
    for ours, published in _PREFIXES:
        if name.startswith(published):
            return ours + name.removeprefix(published)
    return name


def load_pretrained(model: ResNet, file: str | Path) -> None:
    """Fill `model` from a .safetensors or .pth file with torchvision's parameter names.

    Raises:
        ConfigError: The file is missing, or names or shapes differ; every difference is listed and nothing was
            loaded.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"model.pretrained={file}", "there is no such file", "model.pretrained=null")
    read = load_file(path) if path.suffix == ".safetensors" else _load_pickle(path)
    weights = {our_name(name, model): tensor for name, tensor in read.items()}
    targets = model.state_dict(keep_vars=True)
    differences = [f"{name} is missing" for name in targets if name not in weights]
    differences += [f"{name} is unknown" for name in weights if name not in targets]
    for name, target in targets.items():
        if name in weights and weights[name].shape != target.shape:
            published = tuple(weights[name].shape)
            differences.append(f"{name} is {published}, the model's {tuple(target.shape)}")
    if differences:
        raise ConfigError(
            f"model.pretrained={file}",
            f"it does not fit: {'; '.join(differences)}",
            "model.num_classes=1000 model.in_channels=3 model.small_images=false for published weights",
        )
    for name, target in targets.items():
        fill(target, weights[name])


def _load_pickle(path: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights
