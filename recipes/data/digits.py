"""scikit-learn's 1797 scanned digits, bundled with the library: 8 x 8 gray images, 0.5 MB of memory.

Shapes: N images, 1 channel, 8 rows, 8 columns.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.data import SampleDataset
from recipes.data.augmentation import Augmentation
from recipes.data.order import mix64
from recipes.errors import ConfigError, type_extra
from recipes.tokenizer import Tokenizer

_MAX_INK = 16.0  # each pixel counts the dark pixels in a 4 x 4 cell of the scan
_VAL_EVERY = 5  # one image in five, chosen by a hash of its index, is for validation


class LabeledImages(Dataset[dict[str, Tensor]]):
    """Images and their classes, in memory."""

    targets_per_sample: int | None = 1
    tokens_per_sample: int = 0

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """Hold `images` [N, 1, 8, 8] float and `labels` [N] int64."""
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        """Return the number of images, N."""
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample: inputs [1, 8, 8] float in 0 to 1, targets a class, 0-dim int64."""
        return {"inputs": self.images[index], "targets": self.labels[index]}


@dataclass(kw_only=True)
class Digits:
    """Ten classes with about 180 images each; the split is fixed and does not depend on the seed.

    Args:
        random_crop_padding: Train on windows of 8 x 8 pixels, cropped from the image with a border of this many.
        random_horizontal_flip: Train on the mirror image in one case of two.

    Raises:
        ConfigError: A crop could miss the image.
    """

    sample_kind: ClassVar[str] = "images"
    num_channels: ClassVar[int] = 1
    num_classes: ClassVar[int] = 10
    class_names: ClassVar[tuple[str, ...]] = tuple("0123456789")
    image_size: ClassVar[int] = 8
    transform: ClassVar[str] = "dark pixels in each 4 x 4 cell of the scan, 0 to 16, divided by 16"
    val_fingerprint: ClassVar[str] = "digits"
    tokenizer: ClassVar[Tokenizer | None] = None  # the samples are not text

    random_crop_padding: Annotated[int, ">= 0"]
    random_horizontal_flip: bool

    def __post_init__(self) -> None:
        self._augmentation = Augmentation(
            random_crop_padding=self.random_crop_padding,
            random_horizontal_flip=self.random_horizontal_flip,
            image_size=self.image_size,
        )

    @property
    def fingerprint(self) -> str:
        """String that is equal for equal training samples."""
        return "/".join(filter(None, ("digits", self._augmentation.describe())))

    def describe(self) -> str:
        """Return the number of images, and what is drawn for those of training."""
        counts = f"{len(self.train()):,} training and {len(self.val()):,} validation images of 8 x 8"
        return "; training draws ".join(filter(None, (counts, self._augmentation.describe())))

    def prepare(self) -> None:
        """Load the images.

        Raises:
            ConfigError: scikit-learn is not installed.
        """
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ConfigError(
                "data=digits",
                "it needs scikit-learn, which is not installed",
                type_extra("digits"),
            ) from error
        pixels, labels = load_digits(return_X_y=True)
        self._images = torch.from_numpy(pixels / _MAX_INK).float().view(-1, 1, 8, 8)  # [N, 1, 8, 8]
        self._labels = torch.from_numpy(labels.astype(np.int64))  # [N]
        hashes = mix64(np.arange(len(labels), dtype=np.uint64)) % np.uint64(_VAL_EVERY)  # [N]
        self._is_val = torch.from_numpy(hashes == 0)  # [N] bool

    def train(self) -> SampleDataset:
        """Return four images in five."""
        return self._augmentation.of(LabeledImages(self._images[~self._is_val], self._labels[~self._is_val]))

    def val(self) -> LabeledImages:
        """Return one image in five."""
        return LabeledImages(self._images[self._is_val], self._labels[self._is_val])
