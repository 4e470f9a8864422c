"""Small models of timm for tests: a vision transformer, a ConvNeXt and a ResNet."""

from typing import Any

import torch

from recipes.model.timm_model import TimmModel
from recipes.model.weights import initialize

VIT = {
    "name": "vit_tiny_patch16_224",
    "image_size": 32,
    "arguments": {"depth": 2, "patch_size": 8, "embed_dim": 48, "num_heads": 3},
}
CONVNEXT = {"name": "convnext_atto", "arguments": {"depths": [1, 1, 2, 1], "dims": [8, 16, 32, 64]}}
RESNET = {"name": "resnet18", "arguments": {"channels": [8, 16, 32, 64]}}
MODELS = {"vit": VIT, "convnext": CONVNEXT, "resnet": RESNET}
_SETTINGS = {
    "num_classes": 10,
    "in_channels": 3,
    "image_size": None,
    "drop_path": 0.0,
    "dropout": 0.0,
    "norm": "batch",
    "arguments": {},
    "pretrained": None,
}


def small(kind: str, **changes: Any) -> TimmModel:
    """Return a model as a run makes it: without storage, then with weights drawn from a seed or read."""
    with torch.device("meta"):
        model = TimmModel(**(_SETTINGS | MODELS[kind] | changes))  # type: ignore[arg-type]
    model.to_empty(device="cpu")
    initialize(model, seed=3)
    return model


def theirs(kind: str, **changes: Any) -> Any:
    """Return the same model as timm makes it, with other weights."""
    import timm

    settings: dict[str, Any] = {"num_classes": 10} | MODELS[kind]["arguments"]
    settings |= {"img_size": MODELS[kind]["image_size"]} if "image_size" in MODELS[kind] else {}
    return timm.create_model(MODELS[kind]["name"], **(settings | changes))


def make_images(number: int = 4, *, size: int = 32, channels: int = 3) -> torch.Tensor:
    """Return images [B, C, S, S]."""
    return torch.randn(number, channels, size, size, generator=torch.Generator().manual_seed(1))
