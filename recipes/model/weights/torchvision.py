"""Load torchvision's ResNet weights into our models, without torchvision."""

import os
import re
from pathlib import Path

from recipes.errors import ConfigError
from recipes.model.init import fill
from recipes.model.resnet import ResNet
from recipes.model.weights.files import open_file

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
    path, setting = Path(os.path.expanduser(file)), f"model.pretrained={file}"
    if not os.path.isfile(path):
        reason = "it is a folder, not a file" if os.path.isdir(path) else "there is no such file"
        fix = "model.pretrained=<a .safetensors or .pth file of torchvision's ResNet>, or null"
        raise ConfigError(setting, reason, fix)
    targets = model.state_dict(keep_vars=True)
    with open_file(path, setting) as opened:
        names = {our_name(name, model): name for name in opened.names()}
        weights = {name: opened.read(names[name], like=target) for name, target in targets.items() if name in names}
    differences = [f"{name} is missing" for name in targets if name not in weights]
    differences += [f"{name} is unknown" for name in names if name not in targets]
    for name, target in targets.items():
        if name in weights and weights[name].shape != target.shape:
            published = tuple(weights[name].shape)
            differences.append(f"{name} is {published}, the model's {tuple(target.shape)}")
    if differences:
        raise ConfigError(
            setting,
            f"it does not fit: {'; '.join(differences)}",
            "model.num_classes=1000 model.in_channels=3 model.small_images=false for published weights",
        )
    for name, target in targets.items():
        fill(target, weights[name])
