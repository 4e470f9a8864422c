"""Images in the rows of a table, as paths or as bytes, with any columns as targets: `data=image_table`.

The rows are read once: the bytes of their images lie in one file of the cache afterwards, where any of them is read
at once, and all else of them in a list beside it.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from recipes.cache import build_once, open_cache_dir
from recipes.data.image_file import BadImageError, read_file
from recipes.data.images import Columns, ImageSource, ImageSplit, ListedImages, Names, OnBadImage
from recipes.data.read_rows import HUB, Row, check_split, name_type, open_rows
from recipes.data.targets import TargetColumns, TargetKind
from recipes.errors import ConfigError
from recipes.transform.images import ImageTransform

_LIST, _BYTES = "rows.jsonl", "images.bin"
_LISTED = ("path", "place", "begin", "end", "key", "targets")  # of each row; path: None where there are bytes
_VERSION = "1"  # of both files


class ImageTable(ImageSource):
    """One image and its targets per row.

    Args:
        path: CSV, JSONL, JSON, Parquet or Arrow: a file, a folder or a glob; or `hf://` and the id of a hub dataset.
        image: Column of the image: a path, relative to the file of the table; or bytes, as in a hub dataset.
        targets: Column of the targets, or several of them.
        target_kind: What they are: `classes`, by name or number; `labels`, several per image; or `values`.
        separator: Between the labels in a text; None: they are lists.
        val_path: Rows for validation, as in `path`; None: a part of `path`.
        split: Split of a hub dataset.
        val_split: Split of the same hub dataset for validation; None: a part of `split`.
        val_fraction: See `ImageSource`, as the following two.
        transform: What is made of an image.
        on_bad_image: What an image that cannot be decoded is.
        cache_dir: Folder of the rows that were read.

    Raises:
        ConfigError: The settings contradict each other.
    """

    target_kind: ClassVar[str] = "{target_kind}"

    def __init__(
        self,
        *,
        path: str,
        image: str,
        targets: str | Sequence[str],
        target_kind: TargetKind,
        separator: str | None,
        val_path: str | None,
        split: str,
        val_split: str | None,
        val_fraction: Annotated[float, "> 0, < 1"],
        transform: ImageTransform,
        on_bad_image: OnBadImage,
        cache_dir: str,
    ) -> None:
        super().__init__(val_fraction=val_fraction, transform=transform, on_bad_image=on_bad_image)
        self.path = path
        self._columns = TargetColumns.of(targets, target_kind, separator)
        self._rows = ImageRows(image=image, columns=self._columns, cache_dir=cache_dir)
        self._split = split
        self._val = locate_validation(path, val_path=val_path, split=split, val_split=val_split)

    @override
    def list_splits(self) -> dict[str, ImageSplit]:
        """Read the rows.

        Raises:
            ConfigError: A row has no image, or not the targets that it should have.
        """
        training = self._read(self.path, "data.path", self._split, known=None)
        if self._val is None:
            training, held_out = training.divide(self.val_fraction)
        else:
            held_out = self._read(*self._val, known=training.class_names)
        return {"train": training, "val": held_out}

    def _read(self, path: str, setting: str, split: str, known: list[str] | None) -> ImageSplit:
        listed = self._rows.read(path, setting=setting, split=split)
        targets, names = self._columns.read(listed.cells, listed.places, known)
        return ImageSplit.whole(listed.store, targets, names, keys=listed.keys)


def locate_validation(
    path: str, *, val_path: str | None, split: str, val_split: str | None
) -> tuple[str, str, str] | None:
    """Return the path of the rows for validation, its setting, and the split; None: they are a part of `path`.

    Arguments: see `ImageTable`.

    Raises:
        ConfigError: There is a `val_split` of what has no splits.
    """
    if val_split is not None:
        check_split(val_split, {"data.path": path}, split_setting="data.val_split", default="")
        return path, "data.path", val_split
    return None if val_path is None else (val_path, "data.val_path", split)


@dataclass(frozen=True, kw_only=True)
class ImageRows:
    """Reads the images of a table, and some of its columns.

    Attributes:
        image: Column of the image.
        columns: What else is read.
        cache_dir: Folder of the rows that were read.
    """

    image: str
    columns: Columns
    cache_dir: str

    def read(self, path: str, *, setting: str, split: str) -> ListedImages:
        """Return the images of a path, of which bytes are in the cache from then on.

        Raises:
            ConfigError: There are no rows, or one has no image or not the cells that it should have.
        """
        folder = self._open_folder(path, setting, split)
        listed: dict[str, list[Any]] = {name: [] for name in _LISTED}
        with (folder / _LIST).open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                for name, values in listed.items():
                    values.append(row[name])
        if not listed["place"]:
            raise ConfigError(f"{setting}={path}", "it has no rows", f"{setting}=<a table with rows>")
        paths, places, keys = Names(path or "" for path in listed["path"]), Names(listed["place"]), Names(listed["key"])
        bounds = np.array([listed["begin"], listed["end"]], dtype=np.int64).T  # [N, 2]
        return ListedImages(
            store=Cells(paths=paths, places=places, bounds=bounds, cached=folder / _BYTES),
            keys=keys,
            images=Names(path or key for path, key in zip(listed["path"], listed["key"], strict=True)),
            places=places,
            cells=listed["targets"],
        )

    def _open_folder(self, path: str, setting: str, split: str) -> Path:
        """Return the folder of the cache with the rows of a path, which is filled if they are new or have changed."""
        cache_dir = open_cache_dir(self.cache_dir)
        needed = [self.image, *self.columns.names]
        rows = open_rows(path, setting=setting, split=split, fields=needed)
        found = hashlib.blake2b(digest_size=12)
        # paths are relative to files, which may have moved
        place = "" if path.startswith(HUB) else os.path.abspath(os.path.expanduser(path))
        made_by = [_VERSION, rows.content_hash(cache_dir), place, needed, self.columns.kind]
        found.update(repr(made_by).encode("utf-8", "surrogateescape"))

        def build(unfinished: Path) -> None:
            with (unfinished / _BYTES).open("wb") as images, (unfinished / _LIST).open("w", encoding="utf-8") as listed:
                before = None
                for row in rows:
                    before = self._list_row(row, images, setting, before)
                    listed.write(json.dumps(before, default=str) + "\n")

        target = cache_dir / "images" / found.hexdigest()
        build_once(target, build, is_complete=lambda each: (each / _LIST).is_file() and (each / _BYTES).is_file())
        return target

    def _list_row(self, row: Row, images: Any, setting: str, before: dict[str, Any] | None) -> dict[str, Any]:
        """Write the bytes of an image, if it is one of bytes, and return what is listed of a row.

        Args:
            row: The row.
            images: File of the bytes.
            setting: Config key of the path.
            before: What is listed of the row before, which may have the same image; None: it is the first.
        """
        fields = row.parse()
        targets = self.columns.pick(fields, row.place)
        if self.image not in fields:
            known = ", ".join(map(str, fields))
            raise ConfigError(f"data.image={self.image}", f"{row.place} has {known}", "data.image=<one of them>")
        image = fields[self.image]
        if isinstance(image, dict):  # as `datasets` keeps an image
            image = image.get("bytes") or image.get("path")
        listed = {"place": row.place, "targets": targets, "path": None, "begin": 0, "end": 0}
        if isinstance(image, bytes):
            key = hashlib.blake2b(image, digest_size=12).hexdigest()  # copies of an image are in one split
            if before is not None and before["key"] == key:
                return listed | {"begin": before["begin"], "end": before["end"], "key": key}
            begin = images.tell()
            images.write(image)
            return listed | {"begin": begin, "end": begin + len(image), "key": key}
        if not isinstance(image, str) or not image:
            reason = f"its {self.image} is {name_type(image)}, and neither a path nor the bytes of an image"
            raise ConfigError(row.place, reason, "data.image=<another column>, or the rows without it")
        if "://" in image:
            reason = f"its {self.image} is the address {image[:60]}, and images are read from files"
            raise ConfigError(row.place, reason, "the images in a folder, with paths in the table")
        folder = Path.cwd() if row.path is None else row.path.parent
        file = folder / Path(image).expanduser()
        if before is None and not file.exists():  # the others are found missing when they are read
            reason = f"its {self.image} is {image}, and there is no {file}: paths are relative to the table"
            fix = f"{setting}=<the table beside the images>, or absolute paths in it"
            raise ConfigError(row.place, reason, fix)
        return listed | {"path": str(file), "key": image}


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Images of the rows of a table, see `ImageStore`.

    Attributes:
        paths: Of each; empty: its bytes are cached.
        places: Of each, in the table.
        bounds: [N, 2] int64, where the bytes of each begin and end in the cache.
        cached: File of those bytes.
    """

    paths: Sequence[str]
    places: Sequence[str]
    bounds: NDArray[np.int64]
    cached: Path

    def __len__(self) -> int:
        return len(self.places)

    def read(self, number: int) -> bytes:
        """Return an encoded image."""
        begin, end = self.bounds[number].tolist()
        path = self.paths[number]
        try:
            if path:
                return read_file(Path(path))
            with self.cached.open("rb") as file:
                file.seek(begin)
                return file.read(end - begin)
        except FileNotFoundError as error:
            raise BadImageError(f"there is no {path or self.cached}") from error
        except OSError as error:
            fix = "the same command when it can be read, or the rows without it"
            raise ConfigError(self.name(number), f"it cannot be read: {error.strerror}", fix) from error

    def name(self, number: int) -> str:
        """Return the row, and the file if it is one."""
        path = self.paths[number]
        return f"{self.places[number]}, {path}" if path else self.places[number]
