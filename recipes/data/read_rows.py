"""Read rows of JSON, JSONL, Parquet and text files and of Hugging Face datasets, with their location for errors."""

import glob
import gzip
import json
import os
import re
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
_PARQUET_BATCH = 1024  # rows in memory at a time
_SHOWN_CHARACTERS = 60
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Row:
    """One unparsed row.

    Attributes:
        place: File and line, or dataset and index.
        content: A line of JSON, or the fields.
        from_table: Whether the fields are columns: then every object has the fields of all rows, null where it has
            none.
    """

    place: str
    content: bytes | dict[str, Any]
    from_table: bool = False

    @property
    def num_bytes(self) -> int:
        """Approximate size."""
        return len(self.content) if isinstance(self.content, bytes) else len(str(self.content))

    def parse(self) -> dict[str, Any]:
        """Return the fields.

        Raises:
            ConfigError: The line is not JSON, or not an object, or has half of a surrogate pair.
        """
        fields: Any = self.content
        if isinstance(self.content, bytes):
            try:
                fields = json.loads(self.content)
            except (ValueError, RecursionError) as error:
                raise _bad_json(self.place, error) from error
            if _SURROGATE.search(self.content):  # most are halves of a pair, which is one character
                _check_characters(fields, self.place)
        if not isinstance(fields, dict):
            shown = json.dumps(fields, ensure_ascii=False)[:_SHOWN_CHARACTERS]
            raise ConfigError(self.place, f"a row has named fields, and this one is {shown}", '{"<field>": …} there')
        return fields


class Rows(Protocol):
    """A source of rows.

    Attributes:
        name: Name in the log.
    """

    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int:
        """Approximate size on disk or in memory."""

    def content_hash(self, cache_dir: Path) -> str:
        """Return a hash of all rows."""

    def __iter__(self) -> Iterator[Row]: ...


def open_rows(path: str, *, setting: str, hub_split: str, text_field: str | None = None) -> Rows:
    """Return the rows of a path.

    Args:
        path: A file, a folder, a glob, or `hf://` and a dataset id.
        setting: Config key of the path, for errors, such as "data.path".
        hub_split: Split of a hub dataset.
        text_field: Read plain text files too, each as a row with this field; None: do not read them.

    Raises:
        ConfigError: No rows were found.
    """
    if path.startswith(HUB):
        return HubRows(path.removeprefix(HUB), setting=setting, split=hub_split)
    return FileRows(path, setting=setting, text_field=text_field)


class FileRows:
    """Rows of files, in the order of their names.

    Args:
        path: A file; a folder, whose files are selected by suffix; or a glob.
        setting: Config key of the path.
        text_field: Field that holds the content of a plain text file; None: do not read such files.
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
            ConfigError: A file cannot be read, or has changed since it was listed.
        """
        for document in self._documents:
            try:
                yield from self._rows_of(document)
            except (OSError, EOFError, zlib.error) as error:
                raise unreadable(document.path, error) from error
            document.check_unchanged(self._setting)

    @property
    def files(self) -> list[Path]:
        """Files in reading order."""
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
    """A dataset from the Hugging Face hub, or a folder saved by `datasets`, read in order.

    Args:
        name: Dataset id, optionally followed by `:` and a configuration.
        setting: Config key of the path.
        split: Split to read.

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
        except Exception as error:  # the library documents no narrower class
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            fix = f"{setting}={HUB}<id or id:configuration>, or data.hub_split=<split>"
            raise ConfigError(typed, f"datasets says: {reason}", fix) from error

    @property
    def num_bytes(self) -> int:
        """Size of the underlying tables."""
        return int(self._rows.data.nbytes)

    def content_hash(self, cache_dir: Path) -> str:
        """Return the fingerprint that `datasets` gives the rows."""
        return str(self._rows._fingerprint)

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows."""
        for index, fields in enumerate(self._rows):
            yield Row(f"{self.name} row {index + 1}", dict(fields), from_table=True)


def _check_characters(fields: object, place: str) -> None:
    """Reject half of a surrogate pair: JSON can hold it, but it is no character, and no tokenizer reads it."""
    try:
        json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start]).strip("'")
        fix = "the row without it, or with U+FFFD in its place"
        raise ConfigError(place, f"it has {half}, half of a surrogate pair, which is no character", fix) from error


def _text_row(document: Document, field: str) -> Iterator[Row]:
    with _open(document.path) as file:
        data = file.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(document.path, error) from error
    yield Row(document.name, {field: text})


def _json_rows(document: Document) -> Iterator[Row]:
    """Yield the lines of a file, or the items if it holds a JSON list."""
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
    return ConfigError(place, f"invalid JSON: {reason}{column}", "one JSON object a line there")


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
            yield Row(f"{document.name} row {number}", fields, from_table=True)
    except ValueError as error:  # base class of ArrowInvalid
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"data.path={document.path}", f"it is not a valid parquet file ({reason})", "another copy"
        ) from error
