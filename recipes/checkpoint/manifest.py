"""Read and write manifest.json: step, ranks, versions, file sizes and hashes of a checkpoint. Imports no torch.

The hash is XXH3-128: faster than any disk, and it detects any flipped bit. The manifest includes its own hash.
"""

import json
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

MANIFEST_FILE = "manifest.json"
FORMAT = 1
_OWN_HASH = "hash_of_this_file_without_this_line"
_NAME = re.compile(r"step_(\d{1,18})\.ckpt")
_READ_BYTES = 16 << 20
_MOST = 1 << 62  # steps, bytes and whole numbers among the metrics


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        bytes: Size of the file.
        xxh3_128: Hash of the file, in hexadecimal.
    """

    bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a checkpoint and its files.

    Attributes:
        step: Optimizer steps completed.
        world_size: Number of ranks that wrote it.
        strategy: Class of the strategy that wrote it.
        versions: Versions of the libraries that wrote it.
        metrics: Latest metrics of the run by name; one of them selects `best`.
        files: File records by name within the folder.
        ended: Why the run ended here, see `recipes.checkpoint.ending`; None if it went on.
    """

    step: int
    world_size: int
    strategy: str
    versions: Mapping[str, str]
    metrics: Mapping[str, float]
    files: Mapping[str, FileRecord]
    ended: Mapping[str, Any] | None

    @property
    def total_bytes(self) -> int:
        """Total size of all files."""
        return sum(record.bytes for record in self.files.values())

    def text(self) -> str:
        """Return the content of manifest.json."""
        fields = {"format": FORMAT} | asdict(self)
        return _dump(fields | {_OWN_HASH: _hash(_dump(fields))})


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint folder; None if it is missing, damaged or of another format."""
    fields = _read_fields(folder)
    if fields is None or fields.pop("format") != FORMAT:
        return None
    try:
        files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
        manifest = Manifest(files=files, **fields)
    except (AttributeError, KeyError, TypeError):
        return None
    return manifest if _has_values(manifest) else None


def _has_values(manifest: Manifest) -> bool:
    """Return whether each field has a value as a run writes it: a hash shows damage, and anybody can compute it."""
    ended = manifest.ended
    is_plain = all(isinstance(value, str) for value in (manifest.strategy, *_list_texts(manifest.versions)))
    is_counted = _is_count(manifest.step) and _is_count(manifest.world_size) and manifest.world_size > 0
    is_measured = isinstance(manifest.metrics, Mapping) and all(map(_is_number, manifest.metrics.values()))
    has_files = all(
        _is_file_name(name) and _is_count(record.bytes) and isinstance(record.xxh3_128, str)
        for name, record in manifest.files.items()
    )
    is_explained = ended is None or (
        isinstance(ended, Mapping)
        and all(isinstance(ended.get(key), str) for key in ("by", "why"))
        and isinstance(ended.get("settings"), Mapping)
    )
    return is_plain and is_counted and is_measured and has_files and is_explained


def _list_texts(values: object) -> list[object]:
    return [*values.values()] if isinstance(values, Mapping) else [None]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _MOST)


def _read_fields(folder: Path) -> dict[str, Any] | None:
    """Return the fields of an undamaged manifest of any format."""
    path = folder / MANIFEST_FILE
    try:
        if not path.is_file():  # a FIFO would block
            return None
        text = path.read_text(encoding="utf-8")
        fields: dict[str, Any] = json.loads(text)
        own_hash = fields.pop(_OWN_HASH)
        as_written = _dump(fields | {_OWN_HASH: own_hash})
        # compare the text too: a flipped bit in whitespace would leave the fields, and so the hash, unchanged
        is_whole = text == as_written and own_hash == _hash(_dump(fields)) and "format" in fields
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    return fields if is_whole else None


def _is_file_name(name: str) -> bool:
    """Return whether a name stays within its folder: a forged manifest could name any file on this machine."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def find_fault(folder: Path) -> str | None:
    """Check a checkpoint by file names and sizes; return the fault, None if there is none."""
    if not folder.is_dir():
        return "there is no such folder"
    manifest = read_manifest(folder)
    if manifest is None:
        fields = _read_fields(folder)
        if fields is not None and fields["format"] != FORMAT:
            return f"it has format {fields['format']}, which this version does not load: the one that saved it does"
        reason = "is damaged" if (folder / MANIFEST_FILE).exists() else "is missing"
        return f"its {MANIFEST_FILE} {reason}"
    named = _NAME.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        return f"its {MANIFEST_FILE} is of step {manifest.step}"
    for name, record in manifest.files.items():
        try:
            found = (folder / name).stat()
        except OSError:
            return f"{name} is missing"
        if not stat.S_ISREG(found.st_mode):  # a FIFO would block
            return f"{name} is not a regular file"
        size = found.st_size
        if size != record.bytes:
            return f"{name} has {size:,} bytes, not {record.bytes:,}"
    return None


def is_of_newer_format(folder: Path) -> bool:
    """Return whether a later version wrote a checkpoint: valid there, though not here."""
    fields = _read_fields(folder)
    return fields is not None and type(fields["format"]) is int and fields["format"] > FORMAT


def find_content_fault(folder: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
    """Check the content of files against their hashes; return the fault, None if there is none. Reads all of them."""
    for name in names:
        try:
            if hash_file(folder / name) != manifest.files[name].xxh3_128:
                return f"{name} is corrupt: hash mismatch"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def hash_file(path: Path) -> str:
    """Return the XXH3-128 of a file's content, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _hash(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def _dump(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=2) + "\n"
