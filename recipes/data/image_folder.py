"""Images in one folder per class, whose name is that of the class: `data=image_folder`."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import override

from recipes.data.image_file import SUFFIXES, read_file
from recipes.data.images import ImageSource, ImageSplit, Names, list_names
from recipes.errors import ConfigError

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

    def name(self, number: int) -> str:
        """Return the path of a file."""
        return str(self.root / self.paths[number])


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
