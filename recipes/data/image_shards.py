"""Images in WebDataset .tar files, local or in object storage, each read by itself: `data=image_shards`.

A list of where each image begins and ends in its shard is made once, when the shard is first seen, and kept in the
cache. From then on a sample is one range of bytes, so the order of the stream is that of every other source: no shuffle
buffer, and nothing that depends on a worker, a rank or the past.
"""

import hashlib
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from recipes.cache import build_once, open_cache_dir
from recipes.data.image_file import MAX_BYTES, SUFFIXES, BadImageError
from recipes.data.images import Columns, ImageSource, ImageSplit, ListedImages, Names, OnBadImage
from recipes.data.targets import TargetColumns, TargetKind
from recipes.data.token_shards.storage import Storage
from recipes.errors import ConfigError
from recipes.transform.images import ImageTransform

_LIST = "images.jsonl"
_VERSION = "1"  # of that file
_TEXTS = ("cls", "txt")  # members that are a target
_FIELDS = "json"  # that whose fields are targets
_MAX_TEXT_BYTES = 1 << 20


class ImageShards(ImageSource):
    """Samples of WebDataset: members of a .tar file whose names are equal up to the first dot.

    Args:
        path: A .tar file, a folder of them or a glob, optionally with a protocol of fsspec: `s3://bucket/*.tar`.
        targets: What the target of an image is: `cls` or `txt`, the text of a member `<key>.cls`; anything else is a
            field of its member `<key>.json`, or several of them.
        target_kind: What they are: `classes`, by name or number; `labels`, several per image; or `values`.
        separator: Between the labels in a text; None: they are lists.
        val_path: Shards for validation, as in `path`; None: a part of the images of `path`.
        val_fraction: See `ImageSource`, as the following two.
        transform: What is made of an image.
        on_bad_image: What an image that cannot be decoded is.
        cache_dir: Folder of the lists.
    """

    target_kind: ClassVar[str] = "{target_kind}"

    def __init__(
        self,
        *,
        path: str,
        targets: str | Sequence[str],
        target_kind: TargetKind,
        separator: str | None,
        val_path: str | None,
        val_fraction: Annotated[float, "> 0, < 1"],
        transform: ImageTransform,
        on_bad_image: OnBadImage,
        cache_dir: str,
    ) -> None:
        super().__init__(val_fraction=val_fraction, transform=transform, on_bad_image=on_bad_image)
        self.path = path
        self.val_path = val_path
        self._columns = TargetColumns.of(targets, target_kind, separator)
        self._shards = ImagesInShards(columns=self._columns, cache_dir=cache_dir)

    @override
    def list_splits(self) -> dict[str, ImageSplit]:
        """List the members of all shards.

        Raises:
            ConfigError: There are no shards, one is damaged, or an image has no target.
        """
        training = self._read(self.path, "data.path", known=None)
        if self.val_path is None:
            training, held_out = training.divide(self.val_fraction)
        else:
            held_out = self._read(self.val_path, "data.val_path", known=training.class_names)
        return {"train": training, "val": held_out}

    def _read(self, path: str, setting: str, known: list[str] | None) -> ImageSplit:
        listed = self._shards.read(path, setting=setting)
        targets, class_names = self._columns.read(listed.cells, listed.places, known)
        return ImageSplit.whole(listed.store, targets, class_names, keys=listed.keys)


@dataclass(frozen=True, kw_only=True)
class ImagesInShards:
    """Lists the images in shards, and reads the texts or fields beside them.

    Attributes:
        columns: What is read of each sample: members of text, or fields of its member `json`.
        cache_dir: Folder of the lists.
    """

    columns: Columns
    cache_dir: str

    def read(self, path: str, *, setting: str) -> ListedImages:
        """Return the images of all shards of a path.

        Raises:
            ConfigError: There are no shards, one is damaged, or an image has not the cells that it should have.
        """
        cache_dir = open_cache_dir(self.cache_dir)
        storage = Storage(path, setting=setting, suffixes=[".tar"], content=".tar files", cache_dir=cache_dir)
        listed = [self._list(storage, shard, cache_dir) for shard in range(len(storage.names))]
        images = [image | {"shard": shard} for shard, of_shard in enumerate(listed) for image in of_shard]
        if not images:
            fix = f"{setting}=<shards with members such as 1.jpg and 1.cls>"
            raise ConfigError(f"{setting}={path}", f"no member of them ends with {', '.join(SUFFIXES)}", fix)
        names = [Path(name).name for name in storage.names]
        places = Names(f"{names[image['shard']]} {image['name']}" for image in images)
        store = Members(
            storage=storage,
            names=places,
            shards=np.array([image["shard"] for image in images], dtype=np.int64),
            bounds=np.array([[image["begin"], image["end"]] for image in images], dtype=np.int64),
        )
        cells = [self.columns.pick(image["targets"], place) for image, place in zip(images, places, strict=True)]
        return ListedImages(store=store, keys=places, images=places, places=places, cells=cells)

    def _list(self, storage: Storage, shard: int, cache_dir: Path) -> list[dict[str, Any]]:
        """Return the name, bounds and targets of the images of a shard, from the cache if it has not changed."""
        made_by = [_VERSION, storage.get_state(shard), [*self.columns.names]]
        found = hashlib.blake2b(repr(made_by).encode(), digest_size=12)
        folder = cache_dir / "image_shards" / found.hexdigest()

        def build(unfinished: Path) -> None:
            with (unfinished / _LIST).open("w", encoding="utf-8") as lines:
                for image in _list_members(storage, shard, self.columns):
                    lines.write(json.dumps(image) + "\n")

        build_once(folder, build, is_complete=lambda each: (each / _LIST).is_file())
        return [json.loads(line) for line in (folder / _LIST).read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True, kw_only=True)
class Members:
    """Images in .tar files, see `ImageStore`.

    Attributes:
        storage: The files.
        names: Of each image: its shard and its name there.
        shards: [N] int64.
        bounds: [N, 2] int64, where the bytes of each begin and end in its shard.
    """

    storage: Storage
    names: Sequence[str]
    shards: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.shards)

    def read(self, number: int) -> bytes:
        """Return an encoded image."""
        begin, end = self.bounds[number].tolist()
        if end - begin > MAX_BYTES:
            raise BadImageError(f"it has {end - begin:,} bytes, and more than {MAX_BYTES:,} are not read")
        return self.storage.read_range(int(self.shards[number]), begin, end)

    def name(self, number: int) -> str:
        """Return the shard and the member."""
        return self.names[number]


def _list_members(storage: Storage, shard: int, columns: Columns) -> Iterator[dict[str, Any]]:
    """Yield the name, bounds and targets of each image of a shard, in its order.

    Raises:
        ConfigError: A sample has several images, or one has no target.
    """
    name, setting, needed = storage.names[shard], storage.setting, columns.names
    read = {target if target in _TEXTS else _FIELDS for target in needed}  # suffixes of members with targets
    images: dict[str, dict[str, Any]] = {}
    targets: dict[str, dict[str, Any]] = {}
    for archive, member in _walk(storage, shard):
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        key, suffix = f"{folder}/{stem}" if folder else stem, suffix.lower()
        if not member.isreg() or member.issparse() or not stem:
            continue
        if f".{suffix}" in SUFFIXES:
            if key in images:
                reason = f"{images[key]['name']} and {member.name} are images of one sample"
                raise ConfigError(f"{setting}={name}", reason, "shards with one image per key")
            end = member.offset_data + member.size
            images[key] = {"name": member.name, "begin": member.offset_data, "end": end}
        elif suffix in read:
            place = f"{name} {member.name}"
            if member.size > _MAX_TEXT_BYTES:
                reason = f"it has {member.size:,} bytes, and more than {_MAX_TEXT_BYTES:,} are not read"
                raise ConfigError(place, reason, f"{columns.setting}=<another member or field>, or shards without it")
            content = archive.extractfile(member)
            assert content is not None, "a regular file has content"
            targets[key] = targets.get(key, {}) | _parse(content.read(), suffix, columns, place)
    for key, image in images.items():
        if key not in targets:
            wanted = " or ".join(sorted({name if name in _TEXTS else _FIELDS for name in needed}))
            reason = f"{image['name']} has no member {key}.{wanted}"
            fix = f"{columns.setting}={', '.join(_TEXTS)} or a field of .json, or other shards"
            raise ConfigError(f"{setting}={name}", reason, fix)
        yield image | {"targets": targets[key]}


def _walk(storage: Storage, shard: int) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the members of a shard.

    Raises:
        ConfigError: It is damaged or compressed.
    """
    with storage.open_remote(shard) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as archive:
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps all of them
                    yield archive, member
        except (tarfile.TarError, EOFError) as error:
            reason = f"it is no .tar file that can be read: {error}"
            fix = "another copy of it, unpacked if it is a .tar.gz"
            raise ConfigError(f"{storage.setting}={storage.names[shard]}", reason, fix) from error


def _parse(content: bytes, suffix: str, columns: Columns, place: str) -> dict[str, Any]:
    """Return the targets in a member of text, by the name that `columns` have for each."""
    setting = columns.setting
    try:
        text = content.decode("utf-8-sig")
        if suffix != _FIELDS:
            return {suffix: text.strip()}
        fields = json.loads(text)
        names = [name for name in columns.names if name not in _TEXTS]
        if missing := [name for name in names if name not in fields]:
            known = ", ".join(fields) or "no field"
            raise ConfigError(f"{setting}={missing[0]}", f"{place} has {known}", f"{setting}=<one of them>")
        return {name: fields[name] for name in names}
    except ConfigError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        reason = f"it is no {'text' if suffix != _FIELDS else 'JSON object'} in UTF-8: {error}"
        raise ConfigError(place, reason, "a shard without it") from error
