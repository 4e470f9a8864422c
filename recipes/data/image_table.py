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
from recipes.data.images import ImageSource, ImageSplit, Names, OnBadImage
from recipes.data.read_rows import HUB, Row, check_split, name_type, open_rows
from recipes.data.targets import TargetColumns, TargetKind
from recipes.errors import ConfigError
from recipes.transform.images import ImageTransform

_LIST, _BYTES = "rows.jsonl", "images.bin"
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
        self._image = image
        self._columns = TargetColumns.of(targets, target_kind, separator)
        self._split = split
        self._cache_dir = cache_dir
        self._val: tuple[str, str, str] | None = None  # path, its setting, and the split
        if val_split is not None:
            check_split(val_split, {"data.path": path}, split_setting="data.val_split", default="")
            self._val = path, "data.path", val_split
        elif val_path is not None:
            self._val = val_path, "data.val_path", split

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
        folder = self._open_folder(path, setting, split)
        # path or None, where bytes begin and end, key, place, targets
        rows = [json.loads(line) for line in (folder / _LIST).read_text(encoding="utf-8").splitlines()]
        if not rows:
            raise ConfigError(f"{setting}={path}", "it has no rows", f"{setting}=<a table with rows>")
        places = [row["place"] for row in rows]
        targets, names = self._columns.read([row["targets"] for row in rows], places, known)
        store = Cells(
            paths=Names(row["path"] or "" for row in rows),
            places=Names(places),
            bounds=np.array([[row["begin"], row["end"]] for row in rows], dtype=np.int64),
            cached=folder / _BYTES,
        )
        return ImageSplit.whole(store, targets, names, keys=Names(row["key"] for row in rows))

    def _open_folder(self, path: str, setting: str, split: str) -> Path:
        """Return the folder of the cache with the rows of a path, which is filled if they are new or have changed."""
        cache_dir = open_cache_dir(self._cache_dir)
        needed = [self._image, *self._columns.names]
        rows = open_rows(path, setting=setting, split=split, fields=needed)
        found = hashlib.blake2b(digest_size=12)
        # paths are relative to files, which may have moved
        place = "" if path.startswith(HUB) else os.path.abspath(os.path.expanduser(path))
        found.update(repr([_VERSION, rows.content_hash(cache_dir), place, needed]).encode("utf-8", "surrogateescape"))

        def build(unfinished: Path) -> None:
            with (unfinished / _BYTES).open("wb") as images, (unfinished / _LIST).open("w", encoding="utf-8") as listed:
                for number, row in enumerate(rows):
                    cells = self._list_row(row, images, setting, is_first=number == 0)
                    listed.write(json.dumps(cells, default=str) + "\n")

        target = cache_dir / "images" / found.hexdigest()
        build_once(target, build, is_complete=lambda each: (each / _LIST).is_file() and (each / _BYTES).is_file())
        return target

    def _list_row(self, row: Row, images: Any, setting: str, *, is_first: bool) -> dict[str, Any]:
        """Write the bytes of an image, if it is one of bytes, and return what is listed of a row."""
        fields = row.parse()
        targets = self._columns.pick(fields, row.place)
        if self._image not in fields:
            known = ", ".join(map(str, fields))
            raise ConfigError(f"data.image={self._image}", f"{row.place} has {known}", "data.image=<one of them>")
        image = fields[self._image]
        if isinstance(image, dict):  # as `datasets` keeps an image
            image = image.get("bytes") or image.get("path")
        listed = {"place": row.place, "targets": targets, "path": None, "begin": 0, "end": 0}
        if isinstance(image, bytes):
            begin = images.tell()
            images.write(image)
            key = hashlib.blake2b(image, digest_size=12).hexdigest()  # copies of an image are in one split
            return listed | {"begin": begin, "end": begin + len(image), "key": key}
        if not isinstance(image, str) or not image:
            reason = f"its {self._image} is {name_type(image)}, and neither a path nor the bytes of an image"
            raise ConfigError(row.place, reason, "data.image=<another column>, or the rows without it")
        if "://" in image:
            reason = f"its {self._image} is the address {image[:60]}, and images are read from files"
            raise ConfigError(row.place, reason, "the images in a folder, with paths in the table")
        folder = Path.cwd() if row.path is None else row.path.parent
        file = folder / Path(image).expanduser()
        if is_first and not file.exists():  # the others are found missing when they are read
            reason = f"its {self._image} is {image}, and there is no {file}: paths are relative to the table"
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
