"""Images in one folder per class, decoded when they are read, and augmented by (seed, position).

Shapes: C channels, H x W pixels of a file, S x S pixels of a sample.
"""

import hashlib
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from recipes.data.dataset import seeded_generators
from recipes.errors import ConfigError, type_extra
from recipes.tokenizer import Tokenizer
from recipes.transform.images import ImageTransform

LOGGER = logging.getLogger("lightning_recipes")
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test",)}
_MOST_PIXELS = 1 << 28  # of a file: 16,384 x 16,384; more is a mistake, or an attack on the memory
_MOST_TRIES = 100  # files that cannot be read, one after the other
_NUM_NAMED = 3  # classes, files or folders that an error names


@dataclass(kw_only=True)
class ImageFolder:
    """Files below one folder per class, whose name is that of the class.

    Args:
        path: Folder of the classes; or of `train` and `val` (or `validation`), and `test`, each a folder of classes.
        val_path: Folder of the classes of validation; None: that within `path`, or a part of the images.
        val_fraction: Part of the images that are for validation where no folder is, chosen by a hash of their paths.
        transform: What is made of an image.
        on_bad_image: What a file that cannot be decoded is: an `error`, or `skip`: the next one stands in its place,
            and a line of the log names it.

    Raises:
        ConfigError: A setting is out of range.
    """

    sample_kind: ClassVar[str] = "images"
    tokenizer: ClassVar[Tokenizer | None] = None  # the samples are not text

    path: str
    val_path: str | None
    val_fraction: Annotated[float, "> 0, < 1"]
    transform: ImageTransform
    on_bad_image: Literal["error", "skip"]

    def prepare(self) -> None:
        """List the files; a second call does nothing.

        Raises:
            ConfigError: A folder is missing or holds no classes, a class has no images, or the classes of the splits
                differ; or Pillow is not installed.
        """
        if hasattr(self, "_splits"):
            return
        _import_pillow()
        root = _get_folder(self.path, "data.path")
        found = {
            split: next((root / name for name in names if (root / name).is_dir()), None)
            for split, names in _SPLITS.items()
        }
        if self.val_path is not None:
            found["val"] = _get_folder(self.val_path, "data.val_path")
        folder = found["train"] or root
        if found["train"] is None and (found["test"] or (found["val"] and self.val_path is None)):
            given = found["val"] or found["test"]
            reason = f"it has a folder {given.name!r} and none named 'train'"  # type: ignore[union-attr]
            raise ConfigError(f"data.path={self.path}", reason, "a folder of classes, or one of train/ and val/")
        training = _list_files(folder, "data.path")
        self.class_names = training.class_names
        if found["val"] is None:
            training, held_out = _split(training, self.val_fraction)
        else:
            held_out = _list_files(
                found["val"], "data.val_path" if self.val_path else "data.path", known=self.class_names
            )
        self._splits = {"train": training, "val": held_out}
        if found["test"] is not None:
            self._splits["test"] = _list_files(found["test"], "data.path", known=self.class_names)

    @property
    def num_classes(self) -> int:
        """Number of folders; after `prepare`."""
        return len(self.class_names)

    @property
    def fingerprint(self) -> str:
        """String that is equal for equal training samples; after `prepare`."""
        return f"{self._splits['train'].fingerprint}/{self.transform.describe()}/{self.transform.describe_eval()}"

    @property
    def val_fingerprint(self) -> str:
        """String that is equal for equal validation samples; after `prepare`."""
        return f"{self._splits['val'].fingerprint}/{self.transform.describe_eval()}"

    def describe(self) -> str:
        """Return the numbers of images and classes, and what is drawn."""
        counts = ", ".join(f"{len(files):,} {_NAMES[split]} images" for split, files in self._splits.items())
        labels = Counter(self._splits["train"].labels.tolist())
        smallest, largest = min(labels.values()), max(labels.values())
        balance = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
        drawn = f"{counts}; {self.num_classes} classes of {balance} in training; it draws {self.transform.describe()}"
        return "; ".join(filter(None, (drawn, self.transform.describe_origin())))

    def train(self) -> "Images":
        """Return the training samples."""
        return self._images("train")

    def val(self) -> "Images":
        """Return the validation samples."""
        return self._images("val")

    def test(self) -> "Images | None":
        """Return the test samples; None: there is no such folder."""
        return self._images("test") if "test" in self._splits else None

    def _images(self, split: str) -> "Images":
        return Images(self._splits[split], self.transform, skips=self.on_bad_image == "skip")


_NAMES = {"train": "training", "val": "validation", "test": "test"}


@dataclass(frozen=True)
class _Files:
    """Files of a split and their classes.

    Attributes:
        root: Folder of the classes.
        paths: Relative to it, in the order of their names.
        labels: [N] int64.
        class_names: Of all classes, sorted.
    """

    root: Path
    paths: Sequence[str]
    labels: NDArray[np.int64]
    class_names: list[str]

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def fingerprint(self) -> str:
        found = hashlib.blake2b(digest_size=8)
        for path in self.paths:
            found.update(path.encode(errors="surrogateescape") + b"\0")
        return f"image_folder/{len(self)}/{len(self.class_names)}/{found.hexdigest()}"


class Images(Dataset[dict[str, Tensor]]):
    """Images by index, as a validation sees them, and as random samples.

    Args:
        files: Files and classes.
        transform: What is made of an image.
        skips: Whether the next file stands in the place of one that cannot be decoded.
    """

    targets_per_sample: int | None = 1
    tokens_per_sample: int = 0

    def __init__(self, files: _Files, transform: ImageTransform, *, skips: bool) -> None:
        self._files = files
        self._transform = transform
        self._skips = skips
        self._bad: set[int] = set()
        if not transform.mixing.is_on:
            self.mix_pair = None  # type: ignore[assignment, method-assign]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the sample of a validation: inputs [C, S, S] float, targets [] int64."""
        image, label = self._read(index)
        return {"inputs": self._transform(image), "targets": label}

    def sample(self, index: int, rng: Generator) -> dict[str, Tensor]:
        """Return the sample as it is drawn: inputs [C, S, S] float, targets [] int64."""
        image, label = self._read(index)
        with seeded_generators(rng):
            return {"inputs": self._transform.draw(image), "targets": label}

    def mix_pair(
        self, first: dict[str, Tensor], second: dict[str, Tensor], rng: Generator, position: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return two neighbours of the stream, mixed with each other: inputs [C, S, S], targets [V] float."""
        epoch, num_classes = position / len(self), len(self._files.class_names)
        return self._transform.mix_pair(first, second, rng, epoch=epoch, num_classes=num_classes)

    def _read(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image [C, H, W] uint8 and its class, [] int64.

        Raises:
            ConfigError: The file cannot be decoded.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        for place in range(min(_MOST_TRIES, len(self))):
            number = (index + place) % len(self)
            path = self._files.root / self._files.paths[number]
            try:
                return decode(path, self._transform.num_channels), torch.tensor(self._files.labels[number])
            except (OSError, ValueError, SyntaxError) as error:  # Pillow raises SyntaxError for a broken PNG
                if not self._skips:
                    reason = f"it is no image that can be read: {error}"
                    raise ConfigError(str(path), reason, "data.on_bad_image=skip, or move the file away") from error
                if number not in self._bad:
                    self._bad.add(number)
                    LOGGER.warning("%s is skipped, the next image stands in its place: %s", path, error)
        reason = f"none of {_MOST_TRIES} files in a row is an image that can be read"
        raise ConfigError("data.on_bad_image=skip", reason, "data.on_bad_image=error, which names the first of them")


def decode(path: Path, num_channels: int) -> Tensor:
    """Return the image of a file, turned as its EXIF tag says, [C, H, W] uint8.

    Gray, palette, transparent (over white), CMYK and 16-bit images become 8 bits of gray or RGB.

    Args:
        path: The file.
        num_channels: C, 1 or 3.

    Raises:
        OSError: It is truncated, or of no format that Pillow reads.
        ValueError: It has too many pixels.
    """
    image_module, operations = _import_pillow()
    with warnings.catch_warnings(), path.open("rb") as file:
        warnings.simplefilter("ignore")  # of a size below the limit, and of metadata that is damaged
        with image_module.open(file) as image:
            width, height = image.size
            if width * height > _MOST_PIXELS:
                raise ValueError(f"{width} x {height} pixels are more than {_MOST_PIXELS:,}")
            turned = operations.exif_transpose(image)
            pixels = np.array(_to_mode(turned, "L" if num_channels == 1 else "RGB", image_module))  # [H, W(, 3)]
    planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(planes))  # [C, H, W] uint8


def _to_mode(image: Any, mode: str, image_module: Any) -> Any:
    """Return an image of another mode, with the whole range of 16 bits in 8."""
    if image.mode in ("I;16", "I;16B", "I;16L", "I", "F"):
        values = np.asarray(image).astype(np.float64)  # [H, W]
        largest = 65535.0 if image.mode != "F" else 1.0
        image = image_module.fromarray((values.clip(0, largest) * (255.0 / largest)).round().astype(np.uint8), mode="L")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = image_module.new("RGBA", image.size, (255, 255, 255, 255))
        image = image_module.alpha_composite(white, image)
    return image.convert(mode)


def _import_pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ConfigError(
            "data=image_folder", "it needs Pillow, which is not installed", type_extra("vision")
        ) from error
    return Image, ImageOps


def _get_folder(path: str, setting: str) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        reason = "it is a file" if folder.exists() else "there is no such folder"
        raise ConfigError(f"{setting}={path}", reason, f"{setting}=<a folder with one folder per class>")
    return folder


def _list_files(root: Path, setting: str, known: list[str] | None = None) -> _Files:
    """Return the images below a folder of classes.

    Args:
        root: The folder.
        setting: What errors name.
        known: Classes of training; None: these are they.
    """
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        reason = "it has no folder, and the folders in it are the classes"
        raise ConfigError(f"{setting}={root}", reason, f"{setting}=<a folder with one folder per class>")
    if known is not None and names != known:
        missing, more = sorted(set(known) - set(names)), sorted(set(names) - set(known))
        told = [f"has no {_name(missing)}"] if missing else []
        told += [f"has {_name(more)}, which training has not"] if more else []
        fix = "the same folders in both" if not missing else "the missing folders, or none of these images in training"
        raise ConfigError(f"{setting}={root}", f"it {' and '.join(told)}", fix)
    paths: list[str] = []
    labels: list[int] = []
    empty: list[str] = []
    for label, name in enumerate(names):
        of_class = sorted(_walk(root, name))
        paths += of_class
        labels += [label] * len(of_class)
        if not of_class:
            empty.append(name)
    if empty and (known is None or len(empty) == len(names)):
        reason = f"no image is in {_name(empty)}; images end with {', '.join(SUFFIXES)}"
        raise ConfigError(f"{setting}={root}", reason, "images in every folder, or no such folder")
    return _Files(root, paths, np.array(labels, dtype=np.int64), names)


def _walk(root: Path, name: str) -> Iterator[str]:
    """Yield the images below a folder, hidden ones left out, relative to the root."""
    for folder, folders, files in os.walk(root / name, followlinks=True):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for file in files:
            if file.lower().endswith(SUFFIXES) and not file.startswith("."):
                yield os.path.relpath(os.path.join(folder, file), root)


def _split(files: _Files, fraction: float) -> tuple[_Files, _Files]:
    """Divide files by a hash of their paths: each stays in its part when others come or go."""
    limit = int(fraction * 2**32)
    is_val = np.array([_hash(path) < limit for path in files.paths], dtype=bool)  # [N]
    if is_val.all() or not is_val.any():
        reason = f"{len(files)} images have none left for {'training' if is_val.all() else 'validation'}"
        raise ConfigError(f"data.val_fraction={fraction}", reason, "data.val_path=<a folder of classes>")
    parts = []
    for chosen in (~is_val, is_val):
        kept = np.flatnonzero(chosen).tolist()
        parts.append(_Files(files.root, [files.paths[place] for place in kept], files.labels[kept], files.class_names))
    return parts[0], parts[1]


def _hash(path: str) -> int:
    found = hashlib.blake2b(path.encode(errors="surrogateescape"), digest_size=4).digest()
    return int.from_bytes(found, "big")


def _name(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(map(repr, names[:_NUM_NAMED])) + more
