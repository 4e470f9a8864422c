"""What is made of a decoded image before the model sees it: drawn for training, fixed for everything else.

The transforms are those of torchvision (`torchvision.transforms.v2`), which draw from torch's global generator on the
host; `recipes.data.image_folder` seeds it for every sample.

Shapes: C channels, H x W pixels of a file, S x S pixels of a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from recipes.errors import ConfigError, type_extra
from recipes.torchvision_import import repair

Policy = Literal["none", "randaugment", "trivialaugment", "three_augment", "simclr"]
Crop = Literal["resized", "padded", "none"]
Interpolation = Literal["nearest", "bilinear", "bicubic"]
_BITS = 8  # of a channel


def import_transforms() -> Any:
    """Return torchvision's transforms.

    Raises:
        ConfigError: torchvision is not installed.
    """
    repair()
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise ConfigError("transform=", "it needs torchvision, which is not installed", type_extra("vision")) from error
    return v2


@dataclass(kw_only=True)
class ImageTransform:
    """Two pipelines: [C, H, W] uint8 -> [C, S, S] float, with mean 0 and deviation 1 over many images.

    Args:
        size: S.
        crop: What training crops: `resized`, a part of random area and shape, resized to S (Szegedy et al. 2014,
            arXiv:1409.4842); `padded`, a window of S pixels of the resized image with a border; `none`, the resized
            image.
        scale: Smallest and largest part of the area of an image that a `resized` crop takes.
        ratio: Smallest and largest width over height of a `resized` crop.
        padding: Pixels of the border of a `padded` crop.
        flip: Probability of the mirror image.
        policy: Random operations on colors and shape after that: RandAugment (Cubuk et al. 2019, arXiv:1909.13719),
            TrivialAugment (Müller and Hutter 2021, arXiv:2103.10158), one of gray, solarization and blur (3-Augment,
            Touvron et al. 2022, arXiv:2204.07118), or the changes of color, gray and blur of SimCLR (Chen et al. 2020,
            arXiv:2002.05709), each for a part of the images.
        num_operations: Operations of RandAugment per image.
        magnitude: Their strength, of 0 to 30.
        color_jitter: Largest relative change of brightness, contrast and saturation.
        erase: Probability that a rectangle is replaced by zeros (Zhong et al. 2017, arXiv:1708.04896).
        eval_crop: S over the shorter side of the resized image, of which validation sees the center.
        interpolation: Of everything that is resized.
        mean: Mean of each channel, of 0 to 1.
        std: Standard deviation of each channel.
        views: Random samples of each image; with 2 or more, a sample is [views, C, S, S], in validation, too.

    Raises:
        ConfigError: The settings contradict each other, or torchvision is not installed.
    """

    size: Annotated[int, ">= 1"]
    crop: Crop
    scale: Sequence[float]
    ratio: Sequence[float]
    padding: Annotated[int, ">= 0"]
    flip: Annotated[float, ">= 0, <= 1"]
    policy: Policy
    num_operations: Annotated[int, ">= 1"]
    magnitude: Annotated[int, ">= 0, <= 30"]
    color_jitter: Annotated[float, ">= 0, <= 1"]
    erase: Annotated[float, ">= 0, <= 1"]
    eval_crop: Annotated[float, "> 0, <= 1"]
    interpolation: Interpolation
    mean: Sequence[float]
    std: Sequence[float]
    views: Annotated[int, ">= 1"]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            reason = f"transform.mean has {len(self.mean)} channels"
            raise ConfigError(f"transform.std={[*self.std]}", reason, "as many numbers for both")
        for name in ("scale", "ratio"):
            values = getattr(self, name)
            if len(values) != 2 or not 0 < values[0] <= values[1]:
                reason = "it is the smallest and the largest of a range"
                raise ConfigError(f"transform.{name}={[*values]}", reason, f"'transform.{name}=[0.5,1.0]'")
        if self.crop == "padded" and self.padding >= self.size:
            reason = f"a crop of {self.size} x {self.size} pixels could show nothing but the border"
            raise ConfigError(f"transform.padding={self.padding}", reason, f"transform.padding={self.size // 8}")
        self._of_training = self._make_training()
        self._of_validation = self._make_validation()

    @property
    def num_channels(self) -> int:
        """C: 1 of gray images, 3 of color."""
        return len(self.mean)

    def draw(self, image: Tensor) -> Tensor:
        """Return a training sample, drawn from torch's generator on the host: [C, H, W] uint8 -> [C, S, S] float."""
        sample: Tensor = self._of_training(image)
        return sample

    def __call__(self, image: Tensor) -> Tensor:
        """Return the sample of a validation, which is the same at every reading: [C, H, W] uint8 -> [C, S, S] float."""
        sample: Tensor = self._of_validation(image)
        return sample

    def describe(self) -> str:
        """Return the settings that training samples depend on, for the log and the fingerprint."""
        names = {"resized": ("scale", "ratio"), "padded": ("padding",), "none": ()}[self.crop]
        parts = [f"crop={self.crop}", *(f"{name}={getattr(self, name)}" for name in names)]
        parts += [f"{name}={getattr(self, name)}" for name in ("flip", "color_jitter", "erase") if getattr(self, name)]
        if self.policy != "none":
            parts.append(f"policy={self.policy}")
        if self.views > 1:
            parts.append(f"{self.views} views")
        if self.policy == "randaugment":
            parts.append(f"{self.num_operations} operations of magnitude {self.magnitude}")
        return ", ".join(parts)

    def describe_eval(self) -> str:
        """Return the settings that validation samples depend on, for the fingerprint."""
        numbers = f"{[*self.mean]}/{[*self.std]}"
        if self.views > 1:  # they are drawn
            return f"{self.describe()}/{self.size}/{self.interpolation}/{numbers}"
        return f"{self.size}/{self.eval_crop}/{self.interpolation}/{numbers}"

    def _make_training(self) -> Any:
        v2 = import_transforms()
        resizing = {"interpolation": v2.InterpolationMode(self.interpolation), "antialias": True}
        steps: list[Any] = []
        if self.crop == "resized":
            steps.append(v2.RandomResizedCrop(self.size, scale=(*self.scale,), ratio=(*self.ratio,), **resizing))
        else:
            steps.append(v2.Resize((self.size, self.size), **resizing))
        if self.crop == "padded":
            steps.append(v2.RandomCrop(self.size, padding=self.padding))
        if self.flip:
            steps.append(v2.RandomHorizontalFlip(self.flip))
        if self.policy == "randaugment":
            steps.append(v2.RandAugment(num_ops=self.num_operations, magnitude=self.magnitude, num_magnitude_bins=31))
        elif self.policy == "trivialaugment":
            steps.append(v2.TrivialAugmentWide())
        elif self.policy == "three_augment":
            blurred = v2.GaussianBlur(_odd(self.size / 10), sigma=(0.1, 2.0))
            gray = v2.Grayscale(num_output_channels=self.num_channels)
            steps.append(v2.RandomChoice([gray, v2.RandomSolarize(threshold=1 << (_BITS - 1), p=1.0), blurred]))
        elif self.policy == "simclr":
            steps += self._make_simclr(v2)
        if self.color_jitter and self.policy != "simclr":
            steps.append(v2.ColorJitter(*[self.color_jitter] * 3))
        erased = [v2.RandomErasing(self.erase)] if self.erase else []
        return v2.Compose([*steps, *self._to_numbers(v2), *erased])

    def _make_simclr(self, v2: Any) -> list[Any]:
        """Return the operations of SimCLR's appendix A, whose strength s is `color_jitter` over 0.8."""
        jitter = v2.ColorJitter(*[self.color_jitter] * 3, hue=self.color_jitter / 4)
        blur = v2.GaussianBlur(_odd(self.size / 10), sigma=(0.1, 2.0))
        return [v2.RandomApply([jitter], p=0.8), v2.RandomGrayscale(p=0.2), v2.RandomApply([blur], p=0.5)]

    def _make_validation(self) -> Any:
        v2 = import_transforms()
        shorter = round(self.size / self.eval_crop)
        interpolation = v2.InterpolationMode(self.interpolation)
        resize = v2.Resize(shorter, interpolation=interpolation, antialias=True)
        return v2.Compose([resize, v2.CenterCrop(self.size), *self._to_numbers(v2)])

    def _to_numbers(self, v2: Any) -> list[Any]:
        return [v2.ToDtype(torch.float32, scale=True), v2.Normalize([*self.mean], [*self.std])]


def _odd(number: float) -> int:
    """Return the odd number that is nearest, as the size of a kernel has to be."""
    return 2 * int(number / 2) + 1
