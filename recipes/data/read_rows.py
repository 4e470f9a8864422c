"""Read rows of JSON, JSONL, Parquet and text files and of Hugging Face datasets, with their location for errors."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from recipes.data.file_kinds import NUM_HEAD_BYTES, PARQUET
from recipes.data.found_files import FoundFiles, find_files, make_printable, skip_unfinished
from recipes.data.text.corpus import Document, content_digests, not_utf8, reject_other_kind
from recipes.data.unpacked import open_unpacked
from recipes.errors import ConfigError
from recipes.foreign_file import describe_error, reading
from recipes.home import expand_home

HUB = "hf://"
SUFFIXES = (".jsonl", ".ndjson", ".jsonlines", ".jl", ".json", ".parquet")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")  # after any of them but .parquet
_DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json"}  # of a dataset, by `datasets`
_BATCH_ROWS = 1024  # rows in memory at a time
_SHOWN_CHARACTERS = 60
_MAX_LINE_BYTES = 1 << 30
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MARK = b"\xef\xbb\xbf"


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
            fields = _parse_json(self.content, self.place)
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


def open_rows(
    path: str, *, setting: str, hub_split: str, text_field: str | None = None, fields: Sequence[str] | None = None
) -> Rows:
    """Return the rows of a path.

    Args:
        path: A file, a folder, a glob, or `hf://` and a dataset id.
        setting: Config key of the path, for errors, such as "data.path".
        hub_split: Split of a hub dataset.
        text_field: Read plain text files too, each as a row with this field; None: do not read them.
        fields: Fields that are needed; columns of others are not read. None: all.

    Raises:
        ConfigError: No rows were found.
    """
    if path.startswith(HUB):
        return HubRows(path.removeprefix(HUB), setting=setting, split=hub_split, fields=fields)
    return FileRows(path, setting=setting, text_field=text_field, fields=fields)


class FileRows:
    """Rows of files, in the order of their names.

    Args:
        path: A file; a folder, whose files are selected by suffix; or a glob.
        setting: Config key of the path.
        text_field: Field that holds the content of a plain text file; None: do not read such files.
        fields: Columns to read of Parquet files; None: all.
    """

    def __init__(
        self, path: str, *, setting: str, text_field: str | None = None, fields: Sequence[str] | None = None
    ) -> None:
        self._setting = setting
        self._text_field = text_field
        self._fields = fields
        self.name = path
        found = self._find(path)
        self._documents = [
            Document.of(file, name=make_printable(file.relative_to(found.folder).as_posix())) for file in found.files
        ]

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
                fix = f"{self._setting}=<another copy of the file>"
                with reading(document.path, f"{self._setting}={self.name}", fix):
                    yield from self._rows_of(document)
            except MemoryError as error:
                reason = "it does not fit into memory: a JSON list and a text are read whole, JSONL row by row"
                fix = f"{self._setting}=<the same rows as JSONL>"
                raise ConfigError(f"{self._setting}={document.path}", reason, fix) from error
            document.check_unchanged(self._setting)

    @property
    def files(self) -> list[Path]:
        """Files in reading order."""
        return [document.path for document in self._documents]

    def _rows_of(self, document: Document) -> Iterator[Row]:
        stem = _strip_compression(document.name.lower())
        with open_unpacked(document.path, self._setting) as file:
            head = file.peek(NUM_HEAD_BYTES)[:NUM_HEAD_BYTES]
            if head.startswith(PARQUET):
                yield from _parquet_rows(document, self._fields, setting=self._setting)
                return
            reject_other_kind(document.path, head, self._setting)
            if stem.endswith(".parquet"):
                reason = "it is not a Parquet file: it does not begin with PAR1"
                raise ConfigError(f"{self._setting}={document.path}", reason, f"{self._setting}=<another copy>")
            if self._text_field is not None and stem.endswith(TEXT_SUFFIXES):
                yield self._text_row(document, file.read(), self._text_field)
            elif head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
                reason = "it is a web page: its download failed"
                raise ConfigError(f"{self._setting}={document.path}", reason, f"{self._setting}=<another copy>")
            else:
                yield from _json_rows(document, file)

    def _text_row(self, document: Document, data: bytes, field: str) -> Row:
        try:
            return Row(document.name, {field: data.decode("utf-8-sig")})
        except UnicodeDecodeError as error:
            raise not_utf8(document.path, error, setting=self._setting) from error

    def _find(self, path: str) -> FoundFiles:
        plain = SUFFIXES if self._text_field is None else SUFFIXES + TEXT_SUFFIXES
        packed = [f"{suffix}{packing}" for suffix in plain if suffix != ".parquet" for packing in COMPRESSED]
        fix = f"{self._setting}=<JSONL, JSON or Parquet file, a folder of them, or {HUB}<id> of a dataset>"
        folder = expand_home(path, self._setting)
        if any(os.path.isfile(folder / name) for name in _DESCRIPTIONS):
            fix = f"{self._setting}={HUB}{path}, as the folder was saved by datasets"
        return find_files(path, setting=self._setting, fix=fix, suffixes=[*plain, *packed], skip=_skip)


class HubRows:
    """A dataset from the Hugging Face hub, or a folder saved by `datasets`, read in order.

    Args:
        name: Dataset id, optionally followed by `:` and a configuration.
        setting: Config key of the path.
        split: Split to read.
        fields: Columns to read; None: all.

    Raises:
        ConfigError: `datasets` is not installed, or cannot load it.
    """

    def __init__(self, name: str, *, setting: str, split: str, fields: Sequence[str] | None = None) -> None:
        self.name = f"{HUB}{name}"
        self._fields = fields
        typed = f"{setting}={self.name}"
        try:
            import datasets
        except ImportError as error:
            fix = "pip install -e '.[datasets]'"
            raise ConfigError(
                typed, "data sets of the hub need the package datasets, which is not installed", fix
            ) from error
        name, _, configuration = name.partition(":")
        folder = expand_home(name, setting)
        try:
            if os.path.isdir(folder):
                loaded = datasets.load_from_disk(str(folder))
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
        """Yield all rows; images and sounds as the bytes that are stored, not decoded."""
        names = _choose_columns(self._rows.column_names, self._fields)
        rows = self._rows.select_columns(names).with_format("arrow")
        number = 0
        for table in rows.iter(batch_size=_BATCH_ROWS):
            for fields in _list_rows(table, self.name):
                number += 1
                yield Row(f"{self.name} row {number}", fields, from_table=True)


def _skip(path: Path) -> str | None:
    """Return the kind of a file or folder without rows."""
    is_state = path.name == "state.json" and path.with_name("dataset_info.json").is_file()
    return "description of a dataset" if is_state or path.name in _DESCRIPTIONS else skip_unfinished(path)


def _strip_compression(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in COMPRESSED if name.endswith(suffix)), name)


def _check_characters(fields: object, place: str) -> None:
    """Reject half of a surrogate pair: JSON can hold it, but it is no character, and no tokenizer reads it."""
    try:
        json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start]).strip("'")
        fix = "the row without it, or with U+FFFD in its place"
        raise ConfigError(place, f"it has {half}, half of a surrogate pair, which is no character", fix) from error


def _json_rows(document: Document, file: BinaryIO) -> Iterator[Row]:
    """Yield the lines of a file, or the items if it holds a JSON list."""
    number, is_first = 0, True
    while line := file.readline(_MAX_LINE_BYTES):
        number += 1
        if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
            reason = f"a line of it is longer than {_MAX_LINE_BYTES:,} bytes"
            raise ConfigError(f"{document.name}:{number}", reason, "one JSON object a line there, or several documents")
        if number == 1:
            line = line.removeprefix(_MARK)
        if not line.strip():
            continue
        if is_first and line.strip() == b"{":
            reason = "it is one JSON object over many lines; rows are objects of a line each, or a list of them"
            fix = f"jq -c '.<field with the rows>[]' '{document.path}' > rows.jsonl, then its path"
            raise ConfigError(document.name, reason, fix)
        if is_first and line.lstrip().startswith(b"["):
            yield from _items(b"\n" * (number - 1) + line + file.read(), document.name)
            return
        is_first = False
        yield Row(f"{document.name}:{number}", line)


def _items(text: bytes, name: str) -> Iterator[Row]:
    items = _parse_json(text, name, is_line=False)
    has_escapes = _SURROGATE.search(text) is not None
    for index, fields in enumerate(items):
        place = f"{name} item {index + 1}"
        if has_escapes:
            _check_characters(fields, place)
        yield Row(place, fields)


def _parse_json(text: bytes, place: str, *, is_line: bool = True) -> Any:
    """Parse a line, or all lines of a list.

    Raises:
        ConfigError: It is no JSON, or no UTF-8. `json.loads` would guess the encoding of bytes, and take what UTF-8
            forbids: halves of a surrogate pair.
    """
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} of it is not UTF-8 text ({error.reason})"
        raise ConfigError(place, reason, "one JSON object a line there, in UTF-8") from error
    except (ValueError, RecursionError) as error:
        fix = "one JSON object a line there"
        if not isinstance(error, json.JSONDecodeError):
            raise ConfigError(place, f"invalid JSON: {error}", fix) from error
        line = "" if is_line else f":{error.lineno}"
        raise ConfigError(f"{place}{line}", f"invalid JSON: {error.msg}, column {error.colno}", fix) from error


def _parquet_rows(document: Document, fields: Sequence[str] | None, *, setting: str) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        reason = "Parquet files need the package pyarrow, which is not installed"
        raise ConfigError(f"{setting}={document.path}", reason, "pip install -e '.[datasets]'") from error
    file = parquet.ParquetFile(document.path)
    names = _choose_columns(file.schema_arrow.names, fields)
    number = 0
    try:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=names):
            for row in _list_rows(batch, document.name):
                number += 1
                yield Row(f"{document.name} row {number}", row, from_table=True)
    except ConfigError:
        raise
    except Exception as error:
        column = _find_unreadable(file, names)
        if column is None:
            raise
        raise _bad_column(document.name, column, error) from error


def _choose_columns(names: Sequence[str], fields: Sequence[str] | None) -> list[str]:
    """Return the columns to read: those that are needed; all if one is missing, so that the error can list them."""
    needed = [name for name in names if fields is not None and name in fields]
    return needed if fields is not None and len(needed) == len(set(fields)) else list(names)


def _list_rows(table: Any, place: str) -> Iterable[dict[str, Any]]:
    """Return the rows of an Arrow table or batch as fields."""
    columns = {name: _list_values(table.column(name), name, place) for name in table.schema.names}
    return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _list_values(column: Any, name: str, place: str) -> list[Any]:
    """Return the values of a column; dates that Python cannot represent as text."""
    import pyarrow

    try:
        values: list[Any] = column.to_pylist()
    except (OverflowError, ValueError, pyarrow.ArrowException) as error:  # beyond the year 9999, or nanoseconds
        try:
            values = column.cast(pyarrow.string()).to_pylist()
        except pyarrow.ArrowException:
            raise _bad_column(place, name, error) from error
    return values


def _find_unreadable(file: Any, names: Sequence[str]) -> str | None:
    """Return the first column that cannot be read by itself."""
    for name in names:
        try:
            for _ in file.iter_batches(batch_size=_BATCH_ROWS, columns=[name]):
                pass
        except Exception:  # whatever the library raises; the caller reports its error
            return name
    return None


def _bad_column(place: str, column: str, error: Exception) -> ConfigError:
    reason = f"its column {column} cannot be read ({describe_error(error)})"
    return ConfigError(place, reason, f"a copy of the file without {column}")
