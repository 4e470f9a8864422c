"""Images in one folder per class, whose name is that of the class: `data=image_folder`."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import override

from recipes.data.dataset import seeded_generators
from recipes.data.draws import rng_at
from recipes.data.image_transform import ImageTransform
from recipes.errors import ConfigError, type_extra
from recipes.tokenizer import Tokenizer

_SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test",)}


@dataclass(kw_only=True)
class ImageFolder(ImageSource):
    """Files below one folder per class.

    Args:
        path: Folder of the classes; or of `train` and `val` (or `validation`), and `test`, each a folder of classes.
        val_path: Folder of the classes of validation; None: that within `path`, or a part of the images.

    Other arguments: see `ImageSource`.
    """

    path: str
    val_path: str | None

    @override
    def list_splits(self) -> dict[str, ImageSplit]:
        """List the files.

        Raises:
            ConfigError: A folder is missing or holds no classes, a class has no images, or the classes of the splits
                differ.
        """
        root = _get_folder(self.path, "data.path")
        found = {
            split: next((root / name for name in names if (root / name).is_dir()), None)
            for split, names in _SPLITS.items()
        }
        if self.val_path is not None:
            found["val"] = _get_folder(self.val_path, "data.val_path")
        folder = found["train"] or root
        if found["train"] is None and (given := found["test"] or (found["val"] if self.val_path is None else None)):
            reason = f"it has a folder {given.name!r} and none named 'train'"
            raise ConfigError(f"data.path={self.path}", reason, "a folder of classes, or one of train/ and val/")
        training = _list_files(folder, "data.path")
        if found["val"] is None:
            training, held_out = training.divide(self.val_fraction)
        else:
            setting = "data.path" if self.val_path is None else "data.val_path"
            held_out = _list_files(found["val"], setting, known=training.class_names)
        splits = {"train": training, "val": held_out}
        if found["test"] is not None:
            splits["test"] = _list_files(found["test"], "data.path", known=training.class_names)
        return splits


@dataclass(frozen=True)
class Files:
    """Images in files, see `ImageStore`.

    Attributes:
        root: Folder that the paths are relative to.
        paths: In the order of their numbers.
    """

    root: Path
    paths: Sequence[str]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, number: int) -> bytes:
        """Return the content of a file."""
        path = self.root / self.paths[number]
        try:
            return read_file(path)
        except OSError as error:
            fix = "the same command when it can be read, or the data without it"
            raise ConfigError(str(path), f"it cannot be read: {error.strerror}", fix) from error


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

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the sample of a validation: inputs [C, S, S] float, targets [] int64; views are always the same."""
        if self._transform.views > 1:
            return self.sample(index, rng_at(0, index))
        image, label = self._read(index)
        return {"inputs": self._transform(image), "targets": label}

    def sample(self, index: int, rng: Generator) -> dict[str, Tensor]:
        """Return the sample as it is drawn: inputs [C, S, S] or [views, C, S, S] float, targets [] int64."""
        image, label = self._read(index)
        with seeded_generators(rng):
            views = [self._transform.draw(image) for _ in range(self._transform.views)]
        return {"inputs": views[0] if len(views) == 1 else torch.stack(views), "targets": label}

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


def _list_files(root: Path, setting: str, known: list[str] | None = None) -> ImageSplit:
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
        parts = [f"has no {list_names(missing)}"] if missing else []
        parts += [f"has {list_names(more)}, which training has not"] if more else []
        fix = "the same folders in both" if more else "the missing folders in it, which may be empty"
        raise ConfigError(f"{setting}={root}", f"it {' and '.join(parts)}", fix)
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
        reason = f"no image is in {list_names(empty)}; images end with {', '.join(SUFFIXES)}"
        raise ConfigError(f"{setting}={root}", reason, "images in every folder, or no such folder")
    packed = Names(paths)
    return ImageSplit.whole(Files(root, packed), torch.tensor(labels), names, keys=packed)


def _walk(root: Path, name: str) -> Iterator[str]:
    """Yield the images below a folder, hidden ones left out, relative to the root."""
    for folder, folders, files in os.walk(root / name, followlinks=True):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for file in files:
            if file.lower().endswith(SUFFIXES) and not file.startswith("."):
                yield os.path.relpath(os.path.join(folder, file), root)
