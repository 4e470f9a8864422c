"""Random images that are transformed and mixed like those of files, without files."""

from typing import Any, ClassVar

import torch
from numpy.random import Generator
from torch import Tensor

from recipes.data.dataset import seeded_generators
from recipes.transform.images import ImageTransform

NUM_CLASSES = 10
# of conf/transform/imagenet.yaml, for images of 12 x 12 pixels
TRANSFORM: dict[str, Any] = {
    "_target_": "recipes.transform.images.ImageTransform",
    "model": None,
    "in_channels": 3,
    "num_classes": None,
    "size": 8,
    "eval_size": None,
    "crop": "resized",
    "scale": [0.4, 1.0],
    "ratio": [0.75, 1.3333],
    "padding": 1,
    "flip": 0.5,
    "policy": "none",
    "num_operations": 2,
    "magnitude": 9,
    "color_jitter": 0.0,
    "extra": {},
    "erase": 0.0,
    "erase_with": "zeros",
    "eval_crop": 0.875,
    "interpolation": "bilinear",
    "mean": [0.5, 0.5, 0.5],
    "std": [0.25, 0.25, 0.25],
    "mixup": 0.0,
    "cutmix": 0.0,
    "mix_probability": 1.0,
    "mix_switch": 0.5,
    "mix_epochs": None,
    "views": 1,
}


def make_transform(**settings: Any) -> ImageTransform:
    return ImageTransform(**{name: value for name, value in TRANSFORM.items() if name != "_target_"} | settings)


class TransformedImages:
    """A data source and its dataset: N images of ten classes."""

    sample_kind: ClassVar[str] = "images"
    tokenizer = None
    targets_per_sample = 1
    tokens_per_sample = 0
    fingerprint = "transformed"

    def __init__(self, *, num_samples: int, transform: ImageTransform) -> None:
        generator = torch.Generator().manual_seed(0)
        self._images = torch.randint(256, (num_samples, 3, 12, 12), generator=generator, dtype=torch.uint8)
        self._classes = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)  # [N]
        self._transform = transform

    def prepare(self) -> None: ...

    def describe(self) -> str:
        return f"{len(self)} images; it draws {self._transform.describe()}"

    def train(self) -> "TransformedImages":
        return self

    def val(self) -> "TransformedImages":
        return self

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self._transform(self._images[index]), "targets": self._classes[index]}

    def sample(self, index: int, rng: Generator) -> dict[str, Tensor]:
        with seeded_generators(rng):
            return {"inputs": self._transform.draw(self._images[index]), "targets": self._classes[index]}

    def mix_pair(self, first: Any, second: Any, rng: Generator, position: int) -> Any:
        epoch = position / len(self)
        return self._transform.mix_pair(first, second, rng, epoch=epoch, num_classes=NUM_CLASSES)
