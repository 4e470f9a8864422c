"""Rows of JSON, JSONL, parquet and text files and of Hugging Face data sets, each with its place for errors."""

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from recipes.data.glob_files import expand_glob
from recipes.data.text.corpus import Document, content_digests, not_utf8, unreadable
from recipes.errors import ConfigError

HUB = "hf://"
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".txt.gz")
_PARQUET_BATCH = 1024  # rows that are in memory at a time
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Row:
    """One row, not parsed yet.

    Attributes:
        place: File and line, or data set and index.
        content: A line of JSON, or the fields.
    """

    place: str
    content: bytes | dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Size, roughly."""
        return len(self.content) if isinstance(self.content, bytes) else len(str(self.content))

    def parse(self) -> dict[str, Any]:
        """Return the fields.

        Raises:
            ConfigError: The line is no JSON, or no object.
        """
        fields: Any = self.content
        if isinstance(fields, bytes):
            try:
                fields = json.loads(fields)
            except (ValueError, RecursionError) as error:
                raise _bad_json(self.place, error) from error
        if not isinstance(fields, dict):
            shown = json.dumps(fields, ensure_ascii=False)[:_SHOWN_CHARACTERS]
            raise ConfigError(self.place, f"a row has named fields, and this one is {shown}", '{"<field>": …} there')
        return fields


class Rows(Protocol):
    """Where rows come from.

    Attributes:
        name: For the log.
    """

    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int:
        """Size on disk or in memory, roughly."""

    def content_hash(self, cache_dir: Path) -> str:
        """Return a hash of all rows."""

    def __iter__(self) -> Iterator[Row]: ...


def open_rows(path: str, *, setting: str, hub_split: str, text_field: str | None = None) -> Rows:
    """Return the rows of a path.

    Args:
        path: A file, a folder, a glob, or `hf://` and the id of a data set.
        setting: Where the path was typed, for errors: "data.path".
        hub_split: Split of a data set of the hub.
        text_field: Files of plain text are read as well, each as a row with this field; None: they are not.

    Raises:
        ConfigError: There is nothing.
    """
    if path.startswith(HUB):
        return HubRows(path.removeprefix(HUB), setting=setting, split=hub_split)
    return FileRows(path, setting=setting, text_field=text_field)


class FileRows:
    """Files of rows, in the order of their names.

    Args:
        path: A file; a folder, whose files are read by suffix; or a glob.
        setting: Where the path was typed.
        text_field: Of the row that a file of plain text becomes; None: there are none.
    """

    def __init__(self, path: str, *, setting: str, text_field: str | None = None) -> None:
        self._setting = setting
        self._text_field = text_field
        self._suffixes = SUFFIXES if text_field is None else SUFFIXES + TEXT_SUFFIXES
        self.name = path
        files = self._find(Path(path).expanduser())
        folder = Path(os.path.commonpath([file.parent for file in files]))
        self._documents = [Document.of(file, name=file.relative_to(folder).as_posix()) for file in files]

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return sum(document.num_bytes for document in self._documents)

    def content_hash(self, cache_dir: Path) -> str:
        """Return a hash of all names and files, in order."""
        digests = content_digests(self._documents, cache_dir=cache_dir)
        return " ".join(f"{digest} {doc.name}" for digest, doc in zip(digests, self._documents, strict=True))

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows.

        Raises:
            ConfigError: A file cannot be read, or changed meanwhile.
        """
        for document in self._documents:
            try:
                yield from self._rows_of(document)
            except (OSError, EOFError, zlib.error) as error:
                raise unreadable(document.path, error) from error
            document.check_unchanged(self._setting)

    @property
    def files(self) -> list[Path]:
        """The files, in the order in which they are read."""
        return [document.path for document in self._documents]

    def _rows_of(self, document: Document) -> Iterator[Row]:
        if document.name.endswith(".parquet"):
            return _parquet_rows(document)
        if self._text_field is not None and document.name.endswith(TEXT_SUFFIXES):
            return _text_row(document, self._text_field)
        return _json_rows(document)

    def _find(self, path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        if path.is_dir():
            files = [file for file in path.rglob("*") if file.is_file() and file.name.endswith(self._suffixes)]
            reason = f"the folder has no {', '.join(self._suffixes)} file"
        elif glob.has_magic(str(path)):
            files = [file for file in {*expand_glob(str(path))} if file.is_file()]
            reason = "no file matches"
        else:
            files, reason = [], "there is no such file or folder"
        if not files:
            fix = f"{self._setting}=<JSONL, JSON or parquet file, a folder of them, or {HUB}<id> of a data set>"
            raise ConfigError(f"{self._setting}={self.name}", reason, fix)
        return sorted(files)


class HubRows:
    """A data set of the Hugging Face hub, or a folder that `datasets` has saved: read in order, never shuffled.

    Args:
        name: Its id, and `:` and a configuration where it has several.
        setting: Where the path was typed.
        split: To read.

    Raises:
        ConfigError: `datasets` is not installed, or cannot load it.
    """

    def __init__(self, name: str, *, setting: str, split: str) -> None:
        self.name = f"{HUB}{name}"
        typed = f"{setting}={self.name}"
        try:
            import datasets
        except ImportError as error:
            fix = "pip install -e '.[datasets]'"
            raise ConfigError(
                typed, "data sets of the hub need the package datasets, which is not installed", fix
            ) from error
        name, _, configuration = name.partition(":")
        try:
            if Path(name).expanduser().is_dir():
                loaded = datasets.load_from_disk(str(Path(name).expanduser()))
                self._rows: Any = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
            else:
                self._rows = datasets.load_dataset(name, configuration or None, split=split)
        except Exception as error:  # the library documents no class of its own
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            fix = f"{setting}={HUB}<id or id:configuration>, or data.hub_split=<split>"
            raise ConfigError(typed, f"datasets says: {reason}", fix) from error

    @property
    def num_bytes(self) -> int:
        """Size of the tables that the rows are in."""
        return int(self._rows.data.nbytes)

    def content_hash(self, cache_dir: Path) -> str:
        """Return the fingerprint that `datasets` gives the rows."""
        return str(self._rows._fingerprint)

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows."""
        for index, fields in enumerate(self._rows):
            yield Row(f"{self.name} row {index + 1}", dict(fields))


def _text_row(document: Document, field: str) -> Iterator[Row]:
    with _open(document.path) as file:
        data = file.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(document.path, error) from error
    yield Row(document.name, {field: text})


def _json_rows(document: Document) -> Iterator[Row]:
    """Yield the lines of a file, or the items of the list that it holds."""
    with _open(document.path) as file:
        first = file.readline()
        while first and not first.strip():
            first = file.readline()
        file.seek(0)
        if first.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
            yield from _items(file.read(), document.name)
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield Row(f"{document.name}:{number}", line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.name.endswith(".gz") else path.open("rb")


def _items(text: bytes, name: str) -> Iterator[Row]:
    try:
        items = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise _bad_json(f"{name}{line}", error) from error
    for index, fields in enumerate(items):
        yield Row(f"{name} item {index + 1}", fields)


def _bad_json(place: str, error: ValueError | RecursionError) -> ConfigError:
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    return ConfigError(place, f"it is no valid JSON: {reason}{column}", "one JSON object a line there")


def _parquet_rows(document: Document) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        reason = "parquet files need the package pyarrow, which is not installed"
        raise ConfigError(f"data.path={document.path}", reason, "pip install -e '.[datasets]'") from error
    try:
        batches = parquet.ParquetFile(document.path).iter_batches(batch_size=_PARQUET_BATCH)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, fields in enumerate(rows, start=1):
            yield Row(f"{document.name} row {number}", fields)
    except ValueError as error:  # ArrowInvalid is one
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"data.path={document.path}", f"it is no valid parquet file ({reason})", "another copy"
        ) from error
