"""Weights of timm: its folders and files are read as timm reads them, and what is written is read by timm."""

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from timm_models import MODELS, make_images, small, theirs

from recipes.errors import ConfigError

torch.set_num_threads(1)


def save_folder(model: Any, folder: Path) -> str:
    """Write what timm pushes to the hub."""
    import timm

    timm.models.save_for_hf(model, folder, safe_serialization=True)
    return str(folder)


@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_and_a_file_of_timm_give_its_outputs(kind: str, tmp_path: Path) -> None:
    other, images = theirs(kind), make_images()
    other(images)  # moves the running statistics
    other.eval()
    torch.save({"state_dict": other.state_dict(), "epoch": 3, "args": Namespace(lr=0.1)}, tmp_path / "last.pth.tar")
    for place in (save_folder(other, tmp_path / "folder"), str(tmp_path / "last.pth.tar")):
        assert torch.equal(small(kind, pretrained=place).eval()(images), other(images))


def test_a_head_of_other_classes_is_new_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = theirs("resnet", num_classes=7)
    folder = save_folder(other, tmp_path / "folder")
    with caplog.at_level(logging.INFO, logger="lightning_recipes"):
        model = small("resnet", pretrained=folder)
    assert f"{folder} is of 7 classes, and model.num_classes=10: fc.weight, fc.bias are new" in caplog.text
    fresh = small("resnet").state_dict()
    for name, value in model.inner.state_dict().items():
        expected = fresh[f"inner.{name}"] if name.startswith("fc.") else other.state_dict()[name]
        assert torch.equal(value, expected), name


def test_position_embeddings_and_gray_images_are_fitted_by_timm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import timm

    other = theirs("vit", img_size=64)
    folder = save_folder(other, tmp_path / "folder")
    arguments: Any = MODELS["vit"]["arguments"]
    expected = timm.create_model(
        f"local-dir:{folder}", pretrained=True, img_size=32, in_chans=1, **{**arguments, "num_classes": 10}
    )
    with caplog.at_level(logging.INFO, logger="lightning_recipes"):
        model = small("vit", pretrained=folder, in_channels=1)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.inner.state_dict()[name], value), name
    assert "patch_embed.proj.weight [48, 3, 8, 8] -> [48, 1, 8, 8]" in caplog.text
    assert "pos_embed [1, 65, 48] -> [1, 17, 48]" in caplog.text


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = save_folder(theirs("vit"), tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"config\.json describes a vit_tiny_patch16_224.*model\.name=vit_tiny"):
        small("resnet", pretrained=folder)
    torch.save(theirs("resnet").state_dict(), tmp_path / "resnet.pth")
    with pytest.raises(ConfigError, match=r"timm cannot fit it to the model: .*layer1\.2"):
        small("resnet", name="resnet34", pretrained=str(tmp_path / "resnet.pth"))
    with pytest.raises(ConfigError, match="timm cannot fit it to the model"):
        small("convnext", pretrained=str(tmp_path / "resnet.pth"))
    with pytest.raises(ConfigError, match=r"model\.norm=group model\.pretrained=.*model\.norm=frozen"):
        small("resnet", norm="group", pretrained=str(tmp_path / "resnet.pth"))


def test_weights_that_are_not_there_or_damaged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.pretrained="):
        small("resnet", pretrained=str(tmp_path / "nowhere"))
    (tmp_path / "cut.pth").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"cut\.pth.* cannot be read"):
        small("resnet", pretrained=str(tmp_path / "cut.pth"))
