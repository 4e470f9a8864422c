"""Random augmentation of images in memory: crops of the padded image, and horizontal flips.

Shapes: C channels, H x W pixels.
"""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor
from torch.utils.data import Dataset

from recipes.data import SampleDataset
from recipes.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What is drawn for every image, independently.

    Args:
        random_crop_padding: Crop a window of the image's size from the image with a border of this many zeros.
        random_horizontal_flip: Mirror one image in two.
        image_size: The smaller of H and W.

    Raises:
        ConfigError: A crop could miss the image.
    """

    random_crop_padding: int
    random_horizontal_flip: bool
    image_size: int

    def __post_init__(self) -> None:
        if self.random_crop_padding >= self.image_size:
            raise ConfigError(
                f"data.random_crop_padding={self.random_crop_padding}",
                f"a crop of {self.image_size} x {self.image_size} pixels could show nothing but the border",
                f"data.random_crop_padding={self.image_size // 8}",
            )

    def of(self, images: SampleDataset) -> SampleDataset:
        """Return images that are drawn, or the same ones if there is nothing to draw."""
        return AugmentedImages(images, self) if self.describe() else images

    def __call__(self, image: Tensor, rng: Generator) -> Tensor:
        """[C, H, W] -> [C, H, W]; `image` itself is not changed."""
        if border := self.random_crop_padding:
            image = _shift(image, *(int(rng.integers(-border, border, endpoint=True)) for _ in range(2)))
        if self.random_horizontal_flip and rng.random() < 0.5:
            image = image.flip(-1)
        return image

    def describe(self) -> str:
        """Return the settings that are on, for the log and the fingerprint of the training samples."""
        parts = [f"random_crop_padding={self.random_crop_padding}"] if self.random_crop_padding else []
        parts += ["random_horizontal_flip=true"] if self.random_horizontal_flip else []
        return ", ".join(parts)


def _shift(image: Tensor, down: int, right: int) -> Tensor:
    """Move an image [C, H, W] within its frame; what comes in is 0."""
    height, width = image.shape[-2:]
    moved = torch.zeros_like(image)
    moved[:, max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)] = image[
        :, max(0, -down) : height + min(0, -down), max(0, -right) : width + min(0, -right)
    ]
    return moved


class AugmentedImages(Dataset[dict[str, Tensor]]):
    """Images as they are by index, and augmented as random samples.

    Args:
        images: Their `inputs` are [C, H, W].
        augmentation: What is drawn.
    """

    def __init__(self, images: SampleDataset, augmentation: Augmentation) -> None:
        self._images = images
        self._augmentation = augmentation
        self.targets_per_sample = images.targets_per_sample
        self.tokens_per_sample = images.tokens_per_sample

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the image as it is."""
        return self._images[index]

    def sample(self, index: int, rng: Generator) -> dict[str, Any]:
        """Return the image as it is drawn."""
        sample = self._images[index]
        return sample | {"inputs": self._augmentation(sample["inputs"], rng)}
