"""Reproducible random images, to measure speed and memory without files: one copy per image.

Shapes: C channels, S x S pixels.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.data import SampleDataset
from recipes.data.augmentation import Augmentation
from recipes.data.order import mix64
from recipes.errors import ConfigError
from recipes.tokenizer import Tokenizer

_NUM_STARTS = 2**16  # distinct images: windows of one buffer of noise, because drawing each takes 100 times as long


TargetKind = Literal["classes", "labels", "probabilities", "values"]


class NoiseImages(Dataset[dict[str, Tensor]]):
    """Sample i is a window of one buffer of normal noise; its position and its targets depend only on (seed, i).

    There are 65,536 distinct windows, so images repeat in a longer epoch.

    Args:
        num_samples: Number of samples.
        num_classes: Classes are in [0, num_classes).
        in_channels: C.
        image_size: S.
        seed: Seed of the noise, and of positions and targets.
        targets: A class; or `num_classes` labels of 0 or 1, probabilities that add up to 1, or normal numbers.
    """

    tokens_per_sample: int = 0

    def __init__(
        self,
        *,
        num_samples: int,
        num_classes: int,
        in_channels: int,
        image_size: int,
        seed: int,
        targets: TargetKind = "classes",
    ) -> None:
        self.targets = targets
        self.targets_per_sample: int | None = 1 if targets in ("classes", "probabilities") else num_classes
        self.num_samples = num_samples
        self.num_classes = num_classes
        self.shape = (in_channels, image_size, image_size)
        self.seed = seed & ((1 << 64) - 1)
        num_values = in_channels * image_size**2
        noise = np.random.default_rng(self.seed).standard_normal(num_values + _NUM_STARTS, np.float32)
        self._noise = torch.from_numpy(noise)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample: inputs [C, S, S] float with mean 0 and variance 1, targets [] int64 or [V] float32.

        The inputs are a view of the noise: do not change them in place.
        """
        if not -self.num_samples <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        sample = np.array([index % self.num_samples], dtype=np.uint64)
        key = mix64(np.array([self.seed], dtype=np.uint64))
        [bits] = mix64(mix64(sample) ^ key).tolist()
        start, label = bits % _NUM_STARTS, (bits >> 16) % self.num_classes
        image = self._noise[start : len(self._noise) - _NUM_STARTS + start].view(self.shape)  # [C, S, S]
        return {"inputs": image, "targets": self._draw_targets(bits, label)}

    def _draw_targets(self, bits: int, label: int) -> Tensor:
        if self.targets == "classes":
            return torch.tensor(label)
        numbers = np.random.default_rng(bits).standard_normal(self.num_classes, np.float32)  # [V]
        values = torch.from_numpy(numbers)
        if self.targets == "labels":
            return (values > 0).float()
        return values.softmax(dim=0) if self.targets == "probabilities" else values


@dataclass(kw_only=True)
class RandomImages:
    """Normal noise with random targets, which cannot be predicted: with classes, val/loss stays above log(num_classes).

    Args:
        num_classes: Classes are in [0, num_classes); of the other targets, as many numbers per sample.
        in_channels: Channels of an image.
        image_size: Height and width in pixels.
        num_samples: Training samples in one epoch.
        random_crop_padding: Train on windows of `image_size`, cropped from the image with a border of this many pixels.
        random_horizontal_flip: Train on the mirror image in one case of two.
        num_val_samples: Validation samples, from noise of another seed.
        seed: Seed of images and targets; order and augmentation depend on the seed of the run.
        targets: `classes`; or, per sample, `num_classes` `labels` of 0 or 1, `probabilities`, or normal `values`.

    Raises:
        ConfigError: A setting is not positive, or a crop could miss the image.
    """

    sample_kind: ClassVar[str] = "images"
    target_kind: ClassVar[str] = "{targets}"
    tokenizer: ClassVar[Tokenizer | None] = None  # the samples are not text

    num_classes: Annotated[int, ">= 1"]
    in_channels: Annotated[int, ">= 1"]
    image_size: Annotated[int, ">= 1"]
    num_samples: Annotated[int, ">= 1"]
    random_crop_padding: Annotated[int, ">= 0"]
    random_horizontal_flip: bool
    num_val_samples: Annotated[int, ">= 1"] = 64
    seed: Annotated[int, ">= 0"] = 0
    targets: TargetKind

    def __post_init__(self) -> None:
        for name in ("num_classes", "in_channels", "image_size", "num_samples", "num_val_samples"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"data.{name}={value}", "random images need at least 1", f"data.{name}=1")
        self._augmentation = Augmentation(
            random_crop_padding=self.random_crop_padding,
            random_horizontal_flip=self.random_horizontal_flip,
            image_size=self.image_size,
        )

    def prepare(self) -> None:
        """Do nothing: there are no files."""

    @property
    def fingerprint(self) -> str:
        """All settings that the training images and targets depend on."""
        return "/".join(filter(None, (self.val_fingerprint, self._augmentation.describe())))

    @property
    def val_fingerprint(self) -> str:
        """All settings that the validation images and targets depend on."""
        kind = "" if self.targets == "classes" else f"/{self.targets}"
        return f"noise_images/{self.num_classes}/{self.in_channels}/{self.image_size}/{self.seed}{kind}"

    def describe(self) -> str:
        """Return the number of samples."""
        size = f"{self.image_size} x {self.image_size}"
        return f"{self.num_samples:,} random images of {size}, for measurements of speed only"

    def train(self) -> SampleDataset:
        """Return the training samples."""
        return self._augmentation.of(self._images(num_samples=self.num_samples, seed=self.seed))

    def val(self) -> NoiseImages:
        """Return the validation samples."""
        return self._images(num_samples=self.num_val_samples, seed=~self.seed)

    def _images(self, *, num_samples: int, seed: int) -> NoiseImages:
        return NoiseImages(
            num_samples=num_samples,
            num_classes=self.num_classes,
            in_channels=self.in_channels,
            image_size=self.image_size,
            seed=seed,
            targets=self.targets,
        )
