"""Read rows of JSON, CSV, Parquet, Arrow and text files and of Hugging Face datasets, with their place for errors."""

import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from recipes.data import csv_rows
from recipes.data.compression import convert, find_compression
from recipes.data.encodings import explain_not_utf8, is_cut
from recipes.data.file_kinds import NUM_HEAD_BYTES, holds_rows, is_table
from recipes.data.found_files import DESCRIPTION, FoundFiles, find_files, make_printable, skip_unfinished
from recipes.data.table_rows import BATCH_ROWS, check_offsets, choose_columns, list_rows, read_table
from recipes.data.text.corpus import Document, content_digests, not_utf8, reject_other_kind
from recipes.data.unpacked import open_unpacked
from recipes.errors import ConfigError, for_shell, type_extra, type_setting
from recipes.files import count
from recipes.foreign_file import reading
from recipes.home import expand_home

LOGGER = logging.getLogger("lightning_recipes")

HUB = "hf://"
DEFAULT_SPLIT = "train"
SUFFIXES = (".jsonl", ".ndjson", ".jsonlines", ".jl", ".json", ".parquet", ".feather", *csv_rows.SUFFIXES)
_TABLES = (".parquet", ".feather")  # compressed inside
_STATE, _SPLITS = "state.json", "dataset_dict.json"  # of one dataset, and of a dictionary of them, by `datasets`
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")  # after any of them but those of tables
_DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", _SPLITS}  # of a dataset, by `datasets`
_WANTED = "the same rows as a JSONL, JSON, CSV, Parquet or Arrow file"
_SHOWN_CHARACTERS = 60
_MAX_LINE_BYTES = 1 << 30
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MARK, _RECORD = b"\xef\xbb\xbf", b"\x1e"  # the latter begins each line of a JSON text sequence (RFC 7464)


@dataclass(frozen=True)
class Row:
    """One unparsed row.

    Attributes:
        place: File and line, or dataset and index.
        content: A line of JSON, or the fields.
        from_table: Whether the fields are columns: then every object has the fields of all rows, null where it has
            none.
        path: The file; None: a dataset of the hub, or one that was saved.
    """

    place: str
    content: bytes | dict[str, Any]
    from_table: bool = False
    path: Path | None = None

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
            fields = _parse_json(self.content, self.place, self.path)
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
    path: str,
    *,
    setting: str,
    split: str,
    split_setting: str = "data.split",
    text_field: str | None = None,
    fields: Sequence[str] | None = None,
) -> Rows:
    """Return the rows of a path.

    Args:
        path: A file, a folder, a glob, or `hf://` and a dataset id.
        setting: Config key of the path, for errors, such as "data.path".
        split: Split of a hub dataset.
        split_setting: Config key of the split, for errors.
        text_field: Read plain text files too, each as a row with this field; None: do not read them.
        fields: Fields that are needed; columns of others are not read. None: all.

    Raises:
        ConfigError: No rows were found.
    """
    if path.startswith(HUB):
        return HubRows(path.removeprefix(HUB), setting=setting, split=split, split_setting=split_setting, fields=fields)
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
        names = " ".join(f"{digest} {doc.name}" for digest, doc in zip(digests, self._documents, strict=True))
        texts = [document for document in self._documents if self._may_be_text(document)]
        if not (num_lists := sum(map(self._holds_rows, texts))):
            return names
        LOGGER.info(
            "%s=%s: %s JSON rows, and their %s is read; data=text_files reads such a file as one text",
            *(self._setting, self.name),
            *(f"{count(num_lists, 'text file')} {'holds' if num_lists == 1 else 'hold'}", self._text_field),
        )
        return f"{names} rows in texts"

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

    def _may_be_text(self, document: Document) -> bool:
        return self._text_field is not None and _strip_compression(document.name.lower()).endswith(TEXT_SUFFIXES)

    def _holds_rows(self, document: Document) -> bool:
        """Return whether a file with the name of a text is one of rows."""
        fix = f"{self._setting}=<another copy of the file>"
        with (
            reading(document.path, f"{self._setting}={self.name}", fix),
            open_unpacked(document.path, self._setting) as file,
        ):
            return holds_rows(file.peek(NUM_HEAD_BYTES)[:NUM_HEAD_BYTES], self._text_field)

    def _rows_of(self, document: Document) -> Iterator[Row]:
        stem = _strip_compression(document.name.lower())
        with open_unpacked(document.path, self._setting) as file:
            head = file.peek(NUM_HEAD_BYTES)[:NUM_HEAD_BYTES]
            if is_table(head):
                yield from self._table_rows(document, head)
                return
            reject_other_kind(document.path, head, self._setting, wanted=_WANTED)
            if stem.endswith(".parquet") and head.lstrip()[:1] not in (b"{", b"["):
                reason = "it is not a Parquet file: it does not begin with PAR1"
                raise ConfigError(f"{self._setting}={document.path}", reason, f"{self._setting}=<another copy>")
            if stem.endswith(csv_rows.SUFFIXES):
                found = csv_rows.read_csv(file, path=document.path, name=document.name, setting=self._setting)
                for line, cells in found:
                    yield Row(f"{document.name}:{line}", cells, from_table=True, path=document.path)
                return
            if self._may_be_text(document) and not holds_rows(head, self._text_field):
                assert self._text_field is not None
                yield self._text_row(document, file.read(), self._text_field)
            elif head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
                reason = "it is a web page: its download failed"
                raise ConfigError(f"{self._setting}={document.path}", reason, f"{self._setting}=<another copy>")
            else:
                yield from _json_rows(document, file)

    def _table_rows(self, document: Document, head: bytes) -> Iterator[Row]:
        with document.path.open("rb") as file:
            if find_compression(raw := file.read(NUM_HEAD_BYTES)) is not None:  # read at random, so it is not unpacked
                reject_other_kind(document.path, raw, self._setting, wanted=_WANTED)
        rows = read_table(document.path, head, name=document.name, setting=self._setting, fields=self._fields)
        for number, row in enumerate(rows, start=1):
            yield Row(f"{document.name} row {number}", row, from_table=True, path=document.path)

    def _text_row(self, document: Document, data: bytes, field: str) -> Row:
        try:
            return Row(document.name, {field: data.decode("utf-8-sig")})
        except UnicodeDecodeError as error:
            raise not_utf8(document.path, error, setting=self._setting) from error

    def _find(self, path: str) -> FoundFiles:
        plain = SUFFIXES if self._text_field is None else SUFFIXES + TEXT_SUFFIXES
        packed = [f"{suffix}{packing}" for suffix in plain if suffix not in _TABLES for packing in COMPRESSED]
        fix = f"{self._setting}=<JSONL, JSON, CSV, Parquet or Arrow file, a folder of them, or {HUB}<id> of a dataset>"
        folder = expand_home(path, self._setting)
        if os.path.isfile(folder) and _skip(folder) == DESCRIPTION and _is_saved(folder.parent):
            reason = "it describes a dataset that datasets saved, and holds no rows"
            raise ConfigError(
                f"{self._setting}={path}", reason, type_setting(self._setting, f"{HUB}{Path(path).parent}")
            )
        if any(os.path.isfile(folder / name) for name in _DESCRIPTIONS):
            fix = f"{type_setting(self._setting, f'{HUB}{path}')}, as the folder was saved by datasets"
        return find_files(path, setting=self._setting, fix=fix, suffixes=[*plain, *packed], skip=_skip)


class HubRows:
    """A dataset from the Hugging Face hub, or a folder saved by `datasets`, read in order.

    Args:
        name: Dataset id, optionally followed by `:` and a configuration; or a folder.
        setting: Config key of the path.
        split: Split to read.
        split_setting: Config key of the split.
        fields: Columns to read; None: all.

    Raises:
        ConfigError: `datasets` is not installed, or cannot load it.
    """

    def __init__(
        self, name: str, *, setting: str, split: str, split_setting: str, fields: Sequence[str] | None = None
    ) -> None:
        self.name = f"{HUB}{name}"
        self._fields = fields
        self._typed = f"{setting}={self.name}"
        try:
            import datasets
        except ImportError as error:
            fix = type_extra("datasets")
            raise ConfigError(
                self._typed, "data sets of the hub need the package datasets, which is not installed", fix
            ) from error
        folder = _find_folder(name, setting)
        self._copy = f"{setting}=<another copy of the folder>" if folder else f"{setting}=<another dataset>"
        self._files: list[Document] | None = None  # of a saved folder
        if folder is not None:
            self._rows: Any = self._open_saved(folder, name, setting, split, split_setting)
            return
        name, _, configuration = name.partition(":")
        try:
            self._rows = datasets.load_dataset(name, configuration or None, split=split)
        except Exception as error:  # the library documents no narrower class
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            fix = f"{setting}={HUB}<id or id:configuration>, or {split_setting}=<split>"
            raise ConfigError(self._typed, f"datasets says: {reason}", fix) from error

    def _open_saved(self, folder: Path, name: str, setting: str, split: str, split_setting: str) -> Any:
        """Return the split of a folder that `datasets` saved."""
        import datasets

        if not os.path.isdir(expand_home(name, setting)):
            reason = "the folder was saved by datasets, and has no configurations"
            raise ConfigError(self._typed, reason, type_setting(setting, f"{HUB}{name.rpartition(':')[0]}"))
        if not _is_saved(folder):
            if (folder / "dataset_info.json").is_file():
                reason = f"the folder has no {_STATE}: it was saved or copied in part"
                raise ConfigError(self._typed, reason, self._copy)
            reason = f"{HUB} is for a dataset of the hub, or a folder saved by datasets, and this folder is neither"
            raise ConfigError(self._typed, reason, f"{type_setting(setting, name)}, which reads the files in it")
        with reading(folder, self._typed, self._copy):
            if not (folder / _STATE).is_file():
                folder = self._find_split(folder, split, split_setting)
            self._files = _list_saved_files(folder, self._typed, self._copy)
            return datasets.Dataset.load_from_disk(str(folder))

    def _find_split(self, folder: Path, split: str, split_setting: str) -> Path:
        """Return the folder of a split of a dictionary of data sets."""
        names = json.loads((folder / _SPLITS).read_text(encoding="utf-8"))["splits"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"splits in {_SPLITS} is not a list of names")
        if split not in names:
            reason = f"{self.name} has {'the split' if len(names) == 1 else 'the splits'} {', '.join(names)}"
            if re.search(r"[+\[]", split):
                reason += ", and is read by whole splits"
            fixes = " or ".join(type_setting(split_setting, name) for name in names)
            raise ConfigError(f"{split_setting}={split}", reason, fixes or self._copy)
        if not _is_inside(found := folder / split, folder):
            raise ConfigError(self._typed, f"its split {split} is a folder outside of it", self._copy)
        return found

    @property
    def num_bytes(self) -> int:
        """Size of the underlying tables."""
        return int(self._rows.data.nbytes)

    def content_hash(self, cache_dir: Path) -> str:
        """Return a hash of the files that were saved, or the fingerprint that `datasets` gives the rows of the hub.

        That of a saved folder is what its files claim.
        """
        if self._files is not None:
            return " ".join(content_digests(self._files, cache_dir=cache_dir))
        return str(self._rows._fingerprint)

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows; images and sounds as the bytes that are stored, not decoded."""
        names = choose_columns(self._rows.column_names, self._fields, self.name)
        number = 0
        with reading(self.name, self._typed, self._copy):
            rows = self._rows.select_columns(names).with_format("arrow")
            for table in rows.iter(batch_size=BATCH_ROWS):
                check_offsets(table)
                for fields in list_rows(table, self.name):
                    number += 1
                    yield Row(f"{self.name} row {number}", fields, from_table=True)


def check_split(
    split: str, paths: Mapping[str, str], *, split_setting: str = "data.split", default: str = DEFAULT_SPLIT
) -> None:
    """Check that a split that was typed is read by one of the paths.

    Args:
        split: The split.
        paths: Config key -> path.
        split_setting: Config key of the split.
        default: The split if none is typed.

    Raises:
        ConfigError: All of them are files, or folders with a single dataset.
    """
    if split == default or not paths:
        return
    for setting, path in paths.items():
        folder = _find_folder(path.removeprefix(HUB), setting) if path.startswith(HUB) else None
        if path.startswith(HUB) and (folder is None or not (folder / _STATE).is_file()):
            return
    setting, path = next(iter(paths.items()))
    if path.startswith(HUB):
        reason = f"{path} is one dataset, which was saved without splits, and all of it would be read"
    else:
        reason = f"only a path that begins with {HUB} has splits, and all of {path} would be read"
    fix = f"{setting}=<the rows of that split>, without {split_setting}"
    if not path.startswith(HUB) and os.path.isfile(expand_home(path, setting) / _SPLITS):
        fix = f"{type_setting(setting, f'{HUB}{path}')} {type_setting(split_setting, split)}"
    raise ConfigError(f"{setting}={path} {split_setting}={split}", reason, fix)


def _find_folder(name: str, setting: str) -> Path | None:
    """Return the local folder that was typed behind `hf://`, with or without a configuration; None: a hub id."""
    for path in (name, name.rpartition(":")[0]):
        if path and os.path.isdir(folder := expand_home(path, setting)):
            return folder
    return None


def _is_saved(folder: Path) -> bool:
    """Return whether a folder is a dataset, or a dictionary of them, as `datasets` saves it."""
    return any((folder / name).is_file() for name in (_STATE, _SPLITS))


def _list_saved_files(folder: Path, typed: str, fix: str) -> list[Document]:
    """Return the files of a dataset that `datasets` saved, which are those that its state names.

    Raises:
        ConfigError: One is outside of the folder: in a downloaded one, it may be any file of this user's.
    """
    state = folder / _STATE
    names = [file["filename"] for file in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    for name in names:
        if not _is_inside(folder / name, folder):
            reason = f"its {_STATE} names {make_printable(name)}, a file outside of the folder"
            raise ConfigError(typed, reason, fix)
        if not (folder / name).is_file():
            reason = f"its {_STATE} names {make_printable(name)}, and there is no such file"
            raise ConfigError(typed, reason, fix)
    return [Document.of(folder / name, name=name) for name in names]


def _is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path leads to a place in a folder, or from the hub's cache to the files that are kept there."""
    roots = [folder.resolve()]
    # snapshots/<revision>/…/state.json -> …/blobs/<hash>
    roots += [above.parent / "blobs" for above in roots[0].parents if above.name == "snapshots"]
    return any(path.resolve().is_relative_to(root) for root in roots)


def find_list(row: Row) -> str | None:
    """Return the field that holds a list of rows, where a file is one object: `{"version": 1, "data": [{…}, …]}`."""
    if row.from_table or row.path is None:
        return None
    with open_unpacked(row.path, "data.path") as file:
        if len([line for line in itertools.islice(file, 3) if line.strip()]) != 1:
            return None
    lists = [name for name, value in row.parse().items() if isinstance(value, list) and any(map(_is_object, value))]
    return max(lists, key=lambda name: len(row.parse()[name]), default=None)


def name_type(value: object) -> str:
    """Return what a value of a row is, in the words of JSON: `a list`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str | bytes):
        return "text" if isinstance(value, str) else "bytes that are not UTF-8 text"
    if isinstance(value, list | tuple):
        return "a list"
    return "an object" if isinstance(value, Mapping) else f"of type {type(value).__name__}"


def _skip(path: Path) -> str | None:
    """Return the kind of a file or folder without rows."""
    is_state = path.name == _STATE and path.with_name("dataset_info.json").is_file()
    return DESCRIPTION if is_state or path.name in _DESCRIPTIONS else skip_unfinished(path)


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
            raise ConfigError(f"{document.name}:{number}", reason, "one JSON object per line, or several documents")
        if number == 1:
            line = line.removeprefix(_MARK)
        line = line.removeprefix(_RECORD)
        if not line.strip():
            continue
        if is_first and line.strip() == b"{":
            raise _explain_lines(document, line + file.read())
        if is_first and line.lstrip().startswith(b"["):
            yield from _items(b"\n" * (number - 1) + line + file.read(), document)
            return
        is_first = False
        yield Row(f"{document.name}:{number}", line, path=document.path)


def _explain_lines(document: Document, text: bytes) -> ConfigError:
    """Return the error for objects of many lines each, or a single one, with the command that makes rows of it."""
    query = "."
    try:
        first, end = json.JSONDecoder().raw_decode(text.decode("utf-8"))
        lists = [name for name, value in first.items() if isinstance(value, list) and any(map(_is_object, value))]
        if lists and not text.decode("utf-8")[end:].strip():
            query = f".{json.dumps(lists[0], ensure_ascii=False)}[]"
    except (ValueError, RecursionError):
        pass  # jq says where it is damaged
    reason = "it is JSON of several lines an object; rows are objects of a line each, or a list of them"
    return ConfigError(document.name, reason, convert(f"jq -c {for_shell(query)}", document.path))


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _items(text: bytes, document: Document) -> Iterator[Row]:
    items = _parse_json(text, document.name, document.path, is_line=False)
    has_escapes = _SURROGATE.search(text) is not None
    for index, fields in enumerate(items):
        place = f"{document.name} item {index + 1}"
        if has_escapes:
            _check_characters(fields, place)
        yield Row(place, fields, path=document.path)


def _parse_json(text: bytes, place: str, path: Path | None, *, is_line: bool = True) -> Any:
    """Parse a line, or all lines of a list.

    Raises:
        ConfigError: It is no JSON, or no UTF-8. `json.loads` would guess the encoding of bytes, and take what UTF-8
            forbids: halves of a surrogate pair.
    """
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} of it is not UTF-8 text ({error.reason})"
        fix = "one JSON object per line, in UTF-8"
        if path is not None and not is_cut(error):
            fix = explain_not_utf8(path, error)[1]
        raise ConfigError(place, reason, fix) from error
    except (ValueError, RecursionError) as error:
        fix = "one JSON object per line"
        if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
            return json.loads(text.decode("utf-8"), parse_int=_parse_int)
        if not isinstance(error, json.JSONDecodeError):
            raise ConfigError(place, f"invalid JSON: {error}", fix) from error
        if not is_line and error.msg == "Extra data":
            number = text[: len(text) - len(text.lstrip())].count(b"\n") + 1
            reason = "it is a list, and more follows it; rows are objects of a line each, or one list of them"
            raise ConfigError(f"{place}:{number}", reason, fix) from error
        line = "" if is_line else f":{error.lineno}"
        raise ConfigError(f"{place}{line}", f"invalid JSON: {error.msg}, column {error.colno}", fix) from error


def _parse_int(digits: str) -> int | str:
    """Return an integer; one that is longer than Python converts stays text."""
    return digits if len(digits) > sys.get_int_max_str_digits() else int(digits)
