"""What is made of a decoded image before the model sees it: drawn for training, fixed for everything else.

The transforms are those of torchvision (`torchvision.transforms.v2`), which draw from torch's global generator on the
host; the dataset seeds it for every sample.

Shapes: C channels, H x W pixels of a file, S x S pixels of a sample.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from numpy.random import Generator
from torch import Tensor

from recipes.errors import ConfigError, type_extra
from recipes.torchvision_import import repair
from recipes.transform.mixing import Mixing
from recipes.transform.published import IMAGENET, Interpolation, Pixels, read_published

Policy = Literal["none", "randaugment", "trivialaugment", "three_augment", "simclr"]
Crop = Literal["resized", "padded", "none", "own"]
Sample = dict[str, Tensor]
_BITS = 8  # of a channel
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, another one in every process
_TRIED = 256  # pixels of a side of the image on which transforms of one's own are tried
_NOT_SET = ("crop_mode",)  # by any setting of a transform


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
        model: A model of timm by name, or one of CLIP or SigLIP by folder or repository of the hub, whose published
            weights decide what is None of size, eval_crop, interpolation, mean and std; None, or another name: those
            that are usual for ImageNet.
        in_channels: C of a model whose mean and deviation are taken, 1 or 3.
        num_classes: V, the width of mixed targets; None: the classes of the data.
        size: S of training.
        eval_size: S of validation; None: that of training.
        crop: What training crops: `resized`, a part of random area and shape, resized to S (Szegedy et al. 2014,
            arXiv:1409.4842); `padded`, a window of S pixels of the resized image with a border; `none`, the resized
            image; `own`, the image as it is in the file, of which those in `extra` make one of S x S.
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
        extra: Further transforms by name, in this order after those above: any of torchvision or of one's own, called
            with an image [C, S, S] uint8. They draw from torch's global generator alone.
        erase: Probability that a rectangle is replaced (Zhong et al. 2017, arXiv:1708.04896).
        erase_with: What replaces it: `zeros`, the mean color, or `noise`, a normal number in each pixel.
        eval_crop: S over the shorter side of the resized image, of which validation sees the center.
        interpolation: Of everything that is resized.
        mean: Of each channel, of 0 to 1.
        std: Deviation of each channel.
        mixup: As those below, see `Mixing`.
        cutmix: As `Mixing`.
        mix_probability: As `Mixing`.
        mix_switch: As `Mixing`.
        mix_epochs: As `Mixing`.
        views: Random samples of each image; with 2 or more, a sample is [views, C, S, S], in validation, too.

    Raises:
        ConfigError: A setting is out of range, torchvision is not installed, or a transform in `extra` returns another
            shape.
    """

    model: str | None
    in_channels: Literal[1, 3]
    num_classes: Annotated[int, ">= 1"] | None
    size: Annotated[int, ">= 1"] | None
    eval_size: Annotated[int, ">= 1"] | None
    crop: Crop
    scale: Sequence[Annotated[float, "> 0, <= 1"]]
    ratio: Sequence[Annotated[float, "> 0"]]
    padding: Annotated[int, ">= 0"]
    flip: Annotated[float, ">= 0, <= 1"]
    policy: Policy
    num_operations: Annotated[int, ">= 1"]
    magnitude: Annotated[int, ">= 0, <= 30"]
    color_jitter: Annotated[float, ">= 0, <= 1"]
    extra: Mapping[str, Any]
    erase: Annotated[float, ">= 0, <= 1"]
    erase_with: Literal["zeros", "noise"]
    eval_crop: Annotated[float, "> 0, <= 1"] | None
    interpolation: Interpolation | None
    mean: Sequence[Annotated[float, ">= 0, <= 1"]] | None
    std: Sequence[Annotated[float, "> 0"]] | None
    mixup: Annotated[float, ">= 0"]
    cutmix: Annotated[float, ">= 0"]
    mix_probability: Annotated[float, ">= 0, <= 1"]
    mix_switch: Annotated[float, ">= 0, <= 1"]
    mix_epochs: Annotated[float, ">= 0"] | None
    views: Annotated[int, ">= 1"]

    def __post_init__(self) -> None:
        self.pixels, self._origin = self._choose_pixels()
        if len(self.pixels.mean) != len(self.pixels.std):
            reason = f"transform.mean has {len(self.pixels.mean)} channels"
            raise ConfigError(f"transform.std={[*self.pixels.std]}", reason, "as many numbers for both")
        if self.num_channels not in (1, 3):
            reason = "images are gray, of one channel, or of three colors"
            raise ConfigError(f"transform.mean={[*self.pixels.mean]}", reason, "one number or three, as transform.std")
        if min(self.pixels.std) <= 0:
            reason = "every channel is divided by its deviation"
            raise ConfigError(f"transform.std={[*self.pixels.std]}", reason, "numbers greater than 0")
        if self.scale[-1] > 1:
            reason = "it is the part of an image that a crop takes"
            raise ConfigError(f"transform.scale={[*self.scale]}", reason, "'transform.scale=[0.5,1.0]'")
        for name in ("scale", "ratio"):
            values = getattr(self, name)
            if len(values) != 2 or not 0 < values[0] <= values[1]:
                reason = "it is the smallest and the largest of a range"
                raise ConfigError(f"transform.{name}={[*values]}", reason, f"'transform.{name}=[0.5,1.0]'")
        size = self.pixels.size
        if self.crop == "padded" and self.padding >= size:
            reason = f"a crop of {size} x {size} pixels could show nothing but the border"
            raise ConfigError(f"transform.padding={self.padding}", reason, f"transform.padding={size // 8}")
        self.mixing = Mixing(
            mixup=self.mixup,
            cutmix=self.cutmix,
            probability=self.mix_probability,
            switch=self.mix_switch,
            epochs=self.mix_epochs,
        )
        self._of_training = self._make_training()
        self._of_validation = self._make_validation()
        if self.extra or self.crop == "own":
            self._try_extra()

    @property
    def num_channels(self) -> int:
        """C: 1 of gray images, 3 of color."""
        return len(self.pixels.mean)

    def draw(self, image: Tensor) -> Tensor:
        """Return a training sample, drawn from torch's generator on the host: [C, H, W] uint8 -> [C, S, S] float.

        Raises:
            ConfigError: A transform in `extra` returns another shape.
        """
        sample: Tensor = self._of_training(image)
        expected = [self.num_channels, self.pixels.size, self.pixels.size]
        if [*sample.shape] != expected:
            reason = f"an image becomes {[*sample.shape]}, and the model reads {expected}"
            cropped = f"{{_target_: torchvision.transforms.v2.RandomResizedCrop, size: {self.pixels.size}}}"
            fix = f"'+transform.extra.crop={cropped}'" if self.crop == "own" else "transforms that keep the shape"
            raise ConfigError(self._name_extra(), reason, fix)
        return sample

    def __call__(self, image: Tensor) -> Tensor:
        """Return the sample of a validation, which is the same at every reading: [C, H, W] uint8 -> [C, S, S] float."""
        sample: Tensor = self._of_validation(image)
        return sample

    def mix_pair(
        self, first: Sample, second: Sample, rng: Generator, *, epoch: float, num_classes: int
    ) -> tuple[Sample, Sample]:
        """Return two neighbours of a micro-batch, mixed with each other. Arguments: see `Mixing`.

        Args:
            first: inputs [C, S, S] float, and targets.
            second: As the first.
            rng: Generator of the pair.
            epoch: Passes over the training data before the pair.
            num_classes: Classes of the data.
        """
        width = num_classes if self.num_classes is None else self.num_classes
        return self.mixing(first, second, rng, epoch=epoch, num_classes=width)

    def describe(self) -> str:
        """Return the settings that training samples depend on, for the log and the fingerprint."""
        parts = [f"{self.pixels.size} pixels, {self.pixels.interpolation}, crop={self.crop}"]
        parts += [f"scale={[*self.scale]}, ratio={[*self.ratio]}"] if self.crop == "resized" else []
        parts += [f"padding={self.padding}"] if self.crop == "padded" else []
        parts += [f"{name}={getattr(self, name)}" for name in ("flip", "color_jitter", "erase") if getattr(self, name)]
        parts += [f"erase_with={self.erase_with}"] if self.erase else []
        if self.policy != "none":
            parts.append(f"policy={self.policy}")
        if self.policy == "randaugment":
            parts.append(f"{self.num_operations} operations of magnitude {self.magnitude}")
        parts += [_ADDRESS.sub("", str(each)) for each in self.extra.values()]
        parts += [f"{self.views} views"] if self.views > 1 else []
        return ", ".join(filter(None, (*parts, self.mixing.describe())))

    def describe_eval(self) -> str:
        """Return the settings that validation samples depend on, for the fingerprint."""
        pixels = self.pixels
        numbers = f"{[*pixels.mean]}/{[*pixels.std]}"
        if self.views > 1:  # they are drawn
            return f"{self.describe()}/{pixels.size}/{pixels.interpolation}/{numbers}"
        return f"{pixels.eval_size}/{pixels.eval_crop}/{pixels.crop_mode}/{pixels.interpolation}/{numbers}"

    def describe_origin(self) -> str:
        """Return the settings that were not given, and where they are from, for the log; empty: all were given."""
        left_open = [name for name in IMAGENET if name not in _NOT_SET and getattr(self, name) is None]
        chosen = ", ".join(f"{name}={getattr(self.pixels, name)}" for name in left_open)
        return f"{chosen} as {self._origin}" if chosen else ""

    def _choose_pixels(self) -> tuple[Pixels, str]:
        """Return what a model reads, and where it is from as far as it is not given."""
        published, origin = read_published(self.model)
        if self.in_channels == 1:
            published = published | {name: (sum(published[name]) / 3,) for name in ("mean", "std")}
        given = {name: getattr(self, name) for name in IMAGENET if name not in _NOT_SET}
        chosen = published | {name: value for name, value in given.items() if value is not None}
        return Pixels(**chosen, eval_size=self.eval_size or chosen["size"]), origin

    def _make_training(self) -> Any:
        v2, size = import_transforms(), self.pixels.size
        resizing = {"interpolation": v2.InterpolationMode(self.pixels.interpolation), "antialias": True}
        steps: list[Any] = []
        if self.crop == "resized":
            steps.append(v2.RandomResizedCrop(size, scale=(*self.scale,), ratio=(*self.ratio,), **resizing))
        elif self.crop != "own":
            steps.append(v2.Resize((size, size), **resizing))
        if self.crop == "padded":
            steps.append(v2.RandomCrop(size, padding=self.padding))
        if self.flip:
            steps.append(v2.RandomHorizontalFlip(self.flip))
        if self.policy == "randaugment":
            steps.append(v2.RandAugment(num_ops=self.num_operations, magnitude=self.magnitude, num_magnitude_bins=31))
        elif self.policy == "trivialaugment":
            steps.append(v2.TrivialAugmentWide())
        elif self.policy == "three_augment":
            blurred = v2.GaussianBlur(_odd(size / 10), sigma=(0.1, 2.0))
            gray = v2.Grayscale(num_output_channels=self.num_channels)
            steps.append(v2.RandomChoice([gray, v2.RandomSolarize(threshold=1 << (_BITS - 1), p=1.0), blurred]))
        elif self.policy == "simclr":
            steps += self._make_simclr(v2)
        if self.color_jitter and self.policy != "simclr":
            steps.append(v2.ColorJitter(*[self.color_jitter] * 3))
        value = "random" if self.erase_with == "noise" else 0.0
        erased = [v2.RandomErasing(self.erase, value=value)] if self.erase else []
        return v2.Compose([*steps, *self.extra.values(), *self._to_numbers(v2), *erased])

    def _make_simclr(self, v2: Any) -> list[Any]:
        """Return the operations of SimCLR's appendix A, whose strength s is `color_jitter` over 0.8."""
        jitter = v2.ColorJitter(*[self.color_jitter] * 3, hue=self.color_jitter / 4)
        blur = v2.GaussianBlur(_odd(self.pixels.size / 10), sigma=(0.1, 2.0))
        return [v2.RandomApply([jitter], p=0.8), v2.RandomGrayscale(p=0.2), v2.RandomApply([blur], p=0.5)]

    def _make_validation(self) -> Any:
        v2, size = import_transforms(), self.pixels.eval_size
        interpolation = v2.InterpolationMode(self.pixels.interpolation)
        # rounded as timm does, whose published accuracies are of such images
        shorter: Any = math.floor(size / self.pixels.eval_crop)
        whole = (shorter, shorter) if self.pixels.crop_mode == "squash" else shorter
        resize = v2.Resize(whole, interpolation=interpolation, antialias=True)
        return v2.Compose([resize, v2.CenterCrop(size), *self._to_numbers(v2)])

    def _to_numbers(self, v2: Any) -> list[Any]:
        numbers = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([*self.pixels.mean], [*self.pixels.std])]
        return [torch.Tensor.contiguous, *numbers]  # a quarter of the bytes that it would copy after them

    def _try_extra(self) -> None:
        """Call the transforms of one's own once, before the run.

        Raises:
            ConfigError: One does not take an image, or returns another shape.
        """
        gray = torch.linspace(0, (1 << _BITS) - 1, _TRIED).to(torch.uint8)  # [W]
        image = gray.expand(self.num_channels, _TRIED, _TRIED).contiguous()  # [C, H, W]
        with torch.random.fork_rng(devices=[]):
            try:
                self.draw(image)
            except ConfigError:
                raise
            except Exception as error:  # they may be one's own
                reason = f"called with an image {[*image.shape]} of uint8, they raise {type(error).__name__}: {error}"
                fix = "transforms that take such images, of torchvision.transforms.v2"
                raise ConfigError(self._name_extra(), reason, fix) from error

    def _name_extra(self) -> str:
        """Return the settings of the transforms of one's own, as an error names them."""
        settings = [*(["crop=own"] if self.crop == "own" else []), *(f"extra.{name}" for name in self.extra)]
        return " ".join(f"transform.{setting}" for setting in settings)


def _odd(number: float) -> int:
    """Return the odd number that is nearest, as the size of a kernel has to be."""
    return 2 * int(number / 2) + 1
