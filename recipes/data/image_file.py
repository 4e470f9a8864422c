"""The pixels of an encoded image, whoever wrote it: turned upright, 8 bits, gray or RGB, in bounded memory and time.

Pillow decodes. What it would take from a hostile file is limited before it decodes: formats whose decoders are
compiled, pixels, the passes of a progressive JPEG, and the tiles of a TIFF.

Shapes: C channels, H x W pixels.
"""

import contextlib
import functools
import io
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.errors import ConfigError, type_extra

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # not EPS, which starts Ghostscript
MAX_PIXELS = 1 << 27  # 134 million, 400 MB as RGB: a photo has up to 108 million, ImageNet's largest 61
MAX_SIDE = 65_535  # pixels, that of JPEG: a BMP skips up to 255 rows with two bytes
MAX_BYTES = 1 << 29
_BAND_PIXELS = 1 << 22
_MAX_SLOW_PIXELS = 1 << 22  # where Pillow decodes in Python, about 1 us a pixel
_SLOW = ("ppm", "ppm_plain", "bmp_rle")
# pixels times passes: a progressive JPEG of a few kB can ask for thousands of passes over all of its pixels
_MAX_PASSED = 1 << 30
_START_OF_SCAN = re.compile(b"\xff\xda")  # found three times as fast as by `bytes.count`
_ORIENTATION, _TILE_WIDTH, _TILE_LENGTH = 0x0112, 322, 323  # tags of EXIF and TIFF
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


class BadImageError(ValueError):
    """What is wrong with an image, in words for a person."""


def read_file(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        BadImageError: It is no regular file, or larger than an image is.
        OSError: It cannot be read.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):  # a pipe would wait for a writer
        raise BadImageError("it is a pipe or a device, not a file")
    if found.st_size > MAX_BYTES:
        raise BadImageError(f"it has {found.st_size:,} bytes, and more than {MAX_BYTES:,} are not read")
    return path.read_bytes()


def decode(data: bytes, num_channels: int) -> Tensor:
    """Return an image as [C, H, W] uint8, whose strides are those of [H, W, C], which torchvision resizes fastest.

    It is turned as its EXIF tag says. Gray, palette, transparent (over white), CMYK, 16-bit and 1-bit images become 8
    bits of gray or RGB; of an animation, the first frame is read.

    Args:
        data: Content of a BMP, GIF, JPEG, PGM, PNG, PPM, TIFF or WebP file.
        num_channels: C, 1 or 3.

    Raises:
        BadImageError: It is damaged, of another format, or too large.
    """
    with _explaining() as module:
        if not data:
            raise BadImageError("it is empty (0 bytes)")
        image = module.open(io.BytesIO(data), formats=_FORMATS)
        _check_size(image, data)
        image.load()
        if (orientation := _read_orientation(image)) in _TURNS:  # Pillow turns a TIFF when it loads it
            image = image.transpose(getattr(module.Transpose, _TURNS[orientation]))
        pixels = _read_pixels(image, num_channels, module)
    return torch.from_numpy(pixels).permute(2, 0, 1)  # [C, H, W] uint8


def check_header(image: str | bytes) -> None:
    """Check what the header of an image says; takes some 0.1 ms.

    Args:
        image: Path of a file, or its content.

    Raises:
        BadImageError: `decode` rejects such an image.
        OSError: It cannot be read.
    """
    if isinstance(image, str) and not stat.S_ISREG(os.stat(image).st_mode):
        raise BadImageError("it is a pipe or a device, not a file")
    with open(image, "rb") if isinstance(image, str) else io.BytesIO(image) as file, _explaining() as module:
        if not file.read(1):
            raise BadImageError("it is empty (0 bytes)")
        file.seek(0)
        _check_size(module.open(file, formats=_FORMATS), b"")


@contextlib.contextmanager
def _explaining() -> Iterator[Any]:
    """Provide Pillow, and turn what it says of an image into words for a person.

    Raises:
        BadImageError: It has raised anything.
    """
    module = import_pillow()
    try:
        yield module
    except BadImageError:
        raise
    except module.DecompressionBombError as error:  # as soon as it is opened
        raise BadImageError(f"it has more than {MAX_PIXELS:,} pixels") from error
    except module.UnidentifiedImageError as error:
        raise BadImageError(f"it is none of {', '.join(_FORMATS)}") from error
    except Exception as error:  # parsers answer damaged files with nearly any
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise BadImageError(f"it is damaged: {said}") from error


@functools.cache
def import_pillow() -> Any:
    """Return the module of Pillow, whose warnings, of files that it reads nevertheless, are not shown.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401  # Pillow knows the others by itself
    except ImportError as error:
        raise ConfigError("data", "images need Pillow, which is not installed", type_extra("vision")) from error
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Image


def _check_size(image: Any, data: bytes) -> None:
    """Check what decoding would take, from the header alone.

    Raises:
        BadImageError: It is too much.
    """
    width, height = image.size
    pixels = width * height
    if pixels > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise BadImageError(f"{width} x {height} pixels are more than {MAX_PIXELS:,}, or {MAX_SIDE:,} of a side")
    if any(tile[0] in _SLOW for tile in image.tile) and pixels > _MAX_SLOW_PIXELS:
        raise BadImageError(f"{width} x {height} pixels of this kind of {image.format} take minutes to decode")
    # others have one, and videos behind a photo have these two bytes by chance
    passes = len(_START_OF_SCAN.findall(data)) if image.info.get("progressive") else 1
    if passes * pixels > _MAX_PASSED:
        raise BadImageError(f"{passes:,} passes over {width} x {height} pixels take minutes to decode")
    if image.format == "TIFF":
        sides = [image.tag_v2.get(tag, 1) for tag in (_TILE_WIDTH, _TILE_LENGTH)]
        if not all(isinstance(side, int) and 0 < side <= MAX_SIDE for side in sides) or np.prod(sides) > MAX_PIXELS:
            raise BadImageError(f"its tiles are of {' x '.join(map(str, sides))} pixels, more than {MAX_PIXELS:,}")


def _read_orientation(image: Any) -> int:
    """Return how the camera was held, 1 to 8; upright where the metadata are damaged, as the pixels may be whole."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # nearly any, and no viewer shows one
        return 1


def _read_pixels(image: Any, num_channels: int, module: Any) -> NDArray[np.uint8]:
    """Return 8-bit gray or RGB, [H, W, C], converted in bands of rows: in the whole, several copies would be large."""
    width, height = image.size
    mode = "L" if num_channels == 1 else "RGB"
    pixels = np.empty((height, width, num_channels), dtype=np.uint8)
    num_rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, num_rows):
        bottom = min(top + num_rows, height)
        band = image if num_rows >= height else image.crop((0, top, width, bottom))
        pixels[top:bottom] = np.asarray(_to_mode(band, mode, module)).reshape(-1, width, num_channels)
    return pixels


def _to_mode(image: Any, mode: str, module: Any) -> Any:
    """Return an image of another mode, with the whole range of 16 bits in 8."""
    if image.mode in ("I;16", "I;16B", "I;16L", "I;16N", "I", "F"):
        values = np.nan_to_num(np.asarray(image).astype(np.float32))  # [H, W]
        largest = 65535.0 if image.mode != "F" else 1.0
        return module.fromarray((values.clip(0, largest) * (255.0 / largest)).round().astype(np.uint8)).convert(mode)
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = module.new("RGBA", image.size, (255, 255, 255, 255))
        image = module.alpha_composite(white, image)
    return image if image.mode == mode else image.convert(mode)


class OnDemand(Sequence[Tensor]):
    """Images of N questions, each read when it is asked for: those of all at once may take more memory than there is.

    Args:
        number: N.
        read: Returns the images of a question by its number.
    """

    def __init__(self, number: int, read: Callable[[int], Tensor]) -> None:
        self._numbers = range(number)
        self._read = read

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._read(self._numbers[index])
