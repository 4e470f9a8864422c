"""ResNet-18 and ResNet-50: shapes, initial weights, torchvision's names."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from recipes.errors import ConfigError
from recipes.model.resnet import ResNet, ResNet18, ResNet50
from recipes.model.weights import initialize

torch.set_num_threads(1)


ARCHITECTURES = pytest.mark.parametrize("architecture", [ResNet18, ResNet50])


def digits(architecture: type[ResNet] = ResNet18, **changes: object) -> ResNet:
    settings = {"num_classes": 10, "in_channels": 1, "small_images": True}
    model = architecture(**(settings | changes))  # type: ignore[arg-type]
    initialize(model, seed=0)
    return model


def their_name(name: str, architecture: type[ResNet] = ResNet18) -> str:
    """Return torchvision's name of ours: the inverse of `our_name`, written independently."""
    if name.startswith("blocks."):
        _, index, rest = name.split(".", 2)
        rest = rest.replace("norm", "bn").replace("shortcut", "downsample")
        places = {ResNet18: "11223344", ResNet50: "1112222333333444"}[architecture]  # type: ignore[index]
        stage = places[int(index)]
        return f"layer{stage}.{places[: int(index)].count(stage)}.{rest}"
    for ours, theirs in (("stem_conv", "conv1"), ("stem_norm", "bn1"), ("head", "fc")):
        name = name.replace(ours, theirs)
    return name


@ARCHITECTURES
def test_first_loss_is_ln_of_the_classes_and_logits_have_one_row_per_image(architecture: type[ResNet]) -> None:
    model = digits(architecture)
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    logits = model(images)
    assert logits.shape == (4, 10)
    loss = F.cross_entropy(logits, torch.arange(4))
    # The head's 0.01 on 512 features of order 1 makes logits of std 0.2, on 2048 of 0.45
    assert loss.item() == pytest.approx(math.log(10), abs=0.3)


def test_init_sets_statistics_of_batch_norm_as_well_as_weights() -> None:
    model = digits()
    model(torch.rand(4, 1, 8, 8))  # moves the running statistics
    model.to_empty(device="cpu")
    model.init_weights(0)
    assert torch.equal(model.stem_norm.running_mean, torch.zeros(64))
    assert torch.equal(model.stem_norm.running_var, torch.ones(64))
    assert model.stem_norm.num_batches_tracked.item() == 0
    for name, value in digits().state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@ARCHITECTURES
def test_blocks_begin_as_identities(architecture: type[ResNet]) -> None:
    block = digits(architecture).blocks[1]  # the first of ResNet-50 changes the shape
    x = torch.rand(2, block.conv1.in_channels, 4, 4)
    assert torch.equal(block(x), x)


@ARCHITECTURES
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_torchvisions_names_are_read_back_into_equal_weights(
    tmp_path: Path, suffix: str, architecture: type[ResNet]
) -> None:
    source = digits(architecture)
    source(torch.rand(4, 1, 8, 8))
    named = {their_name(name, architecture): value for name, value in source.state_dict().items()}
    assert {"layer2.0.downsample.1.running_var", "layer4.1.bn2.bias", "fc.weight"} <= set(named)
    assert ("layer3.5.bn3.bias" in named) == (architecture is ResNet50)
    file = tmp_path / f"resnet{suffix}"
    save_file(named, file) if suffix == ".safetensors" else torch.save(named, file)
    model = digits(architecture, pretrained=str(file))
    for name, value in source.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_weights_of_another_shape_are_rejected_and_every_difference_is_listed(
    tmp_path: Path,
) -> None:
    named = {their_name(name): value for name, value in digits().state_dict().items()}
    save_file(named, tmp_path / "resnet18.safetensors")
    with pytest.raises(ValueError, match=r"stem_conv\.weight is .*; head\.weight is .*; head\.bias is"):
        digits(num_classes=7, in_channels=3, pretrained=str(tmp_path / "resnet18.safetensors"))


def test_weights_of_a_deeper_resnet_are_rejected_and_its_additional_blocks_are_listed(tmp_path: Path) -> None:
    named = {their_name(name, ResNet50): value for name, value in digits(ResNet50).state_dict().items()}
    save_file(named, tmp_path / "resnet50.safetensors")
    with pytest.raises(ValueError, match=r"blocks\.0\.conv3\.weight is unknown.*layer1\.2\.conv1\.weight is unknown"):
        digits(pretrained=str(tmp_path / "resnet50.safetensors"))


def test_a_file_that_is_not_there_or_damaged_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.pretrained=nowhere\.pth: there is no such file"):
        digits(pretrained="nowhere.pth")
    with pytest.raises(ConfigError, match="it is a folder, not a file"):
        digits(pretrained=str(tmp_path))
    for name in ("cut.pth", "cut.safetensors"):
        (tmp_path / name).write_bytes(b"PK")
        with pytest.raises(ConfigError, match=rf"model\.pretrained={tmp_path}/{name}: .* cannot be read: "):
            digits(pretrained=str(tmp_path / name))
