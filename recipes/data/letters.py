"""Letters of the fonts that come with matplotlib, tested on fonts that were never seen: nothing to download.

Shapes: N images, S x S pixels.
"""

from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.data.images import Images, ImageSplit
from recipes.data.order import mix64
from recipes.errors import ConfigError, type_extra
from recipes.tokenizer import Tokenizer
from recipes.transform.images import ImageTransform

_TRAINING = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
)
_VALIDATION = (
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "STIXGeneralBolIta",
    "cmr10",
    "cmb10",
    "cmss10",
    "cmtt10",
    "cmti10",
)
_INK = 0.64  # size of a font in parts of the side of an image


@dataclass(kw_only=True)
class Letters:
    """The 26 lowercase letters in 6 fonts for training, and in 9 other ones, italics among them, for validation.

    Args:
        image_size: S of the drawn images, gray; `transform.size` is what the model sees.
        transform: What is made of an image.
        shuffle_labels: Give each training image a class by chance, as a control from which nothing can be learned.

    Raises:
        ConfigError: `prepare` finds no matplotlib or no Pillow.
    """

    sample_kind: ClassVar[str] = "images"
    num_channels: ClassVar[int] = 1
    num_classes: ClassVar[int] = len(ascii_lowercase)
    class_names: ClassVar[tuple[str, ...]] = tuple(ascii_lowercase)
    tokenizer: ClassVar[Tokenizer | None] = None  # the samples are not text

    image_size: Annotated[int, ">= 8"]
    transform: ImageTransform
    shuffle_labels: bool

    def prepare(self) -> None:
        """Draw the letters; a second call does nothing.

        Raises:
            ConfigError: matplotlib or Pillow is not installed.
        """
        if hasattr(self, "_training"):
            return
        self._training, self._validation = (self._draw(fonts) for fonts in (_TRAINING, _VALIDATION))

    def _draw(self, fonts: tuple[str, ...]) -> NDArray[np.uint8]:
        """Return images [N, S, S], white on black, one font after the other."""
        try:
            import matplotlib
            from PIL import Image, ImageDraw, ImageFont
        except ImportError as error:
            reason = "it draws with Pillow the fonts of matplotlib, which are not installed"
            raise ConfigError("data=letters", reason, type_extra("vision")) from error
        folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        drawn = np.zeros((len(fonts), len(ascii_lowercase), self.image_size, self.image_size), dtype=np.uint8)
        middle = self.image_size / 2
        for font, letters in zip(fonts, drawn, strict=True):
            face = ImageFont.truetype(str(folder / f"{font}.ttf"), round(_INK * self.image_size))
            for letter, pixels in zip(ascii_lowercase, letters, strict=True):
                image = Image.new("L", (self.image_size, self.image_size))
                left, top, right, bottom = face.getbbox(letter)
                place = (middle - (left + right) / 2, middle - (top + bottom) / 2)
                ImageDraw.Draw(image).text(place, letter, fill=255, font=face)
                pixels[:] = np.asarray(image)
        return drawn.reshape(-1, self.image_size, self.image_size)

    @property
    def fingerprint(self) -> str:
        """String that is equal for equal training samples."""
        shuffled = "/shuffled" if self.shuffle_labels else ""
        return f"{self.val_fingerprint}/{self.transform.describe()}{shuffled}"

    @property
    def val_fingerprint(self) -> str:
        """String that is equal for equal validation samples."""
        return f"letters/{self.image_size}/{self.transform.describe_eval()}"

    def describe(self) -> str:
        """Return the numbers of images and fonts, and what is drawn."""
        counts = f"{len(self._training)} training images of {len(_TRAINING)} fonts"
        held_out = f"{len(self._validation)} validation images of {len(_VALIDATION)} other fonts"
        return f"{counts}, {held_out}; it draws {self.transform.describe()}"

    def train(self) -> Images:
        """Return the letters of the training fonts."""
        return self._images(self._training, shuffles=self.shuffle_labels)

    def val(self) -> Images:
        """Return the letters of the other fonts."""
        return self._images(self._validation, shuffles=False)

    def _images(self, images: NDArray[np.uint8], *, shuffles: bool) -> Images:
        labels = np.arange(len(images), dtype=np.int64) % self.num_classes  # [N]
        if shuffles:
            labels = (mix64(np.arange(len(images), dtype=np.uint64)) % np.uint64(self.num_classes)).astype(np.int64)
        split = ImageSplit.whole(_Drawn(images), torch.from_numpy(labels), [*self.class_names])
        return Images(split, self.transform, skips=False)


class _Drawn:
    """Letters [N, S, S] as encoded images, which are read as those of files are."""

    def __init__(self, images: NDArray[np.uint8]) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def read(self, number: int) -> bytes:
        """Return an image as a PGM file."""
        height, width = self._images.shape[1:]
        pixels: bytes = self._images[number].tobytes()
        return b"P5 %d %d 255\n" % (width, height) + pixels

    def name(self, number: int) -> str:
        """Return a name for errors and the log."""
        return f"letter {number}"
