"""Text documents stored as rows of files or of a dataset, with a validation split."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from recipes.data.compression import NEW_FILE, convert
from recipes.data.encodings import UNKNOWN, guess_encoding
from recipes.data.read_rows import Row, Rows, find_list, name_type
from recipes.data.text.token_corpus import hash_text
from recipes.errors import ConfigError, for_shell, python, type_setting

_PANDAS = {".parquet": "read_parquet", ".feather": "read_feather", ".csv": "read_csv", ".tsv": "read_table"}
_TO_ROWS = "to_json(sys.stdout, orient='records', lines=True)"  # of pandas
_SHOWN_FIELDS = 4  # that hold text, in what to type
_MAX_LOOKED_AT = 1000  # rows, once the first is no document
# for rows that are not documents
_DROP = (
    "mode=prepare quality=none mode.exact_copies=false mode.near_copies=null mode.output=<folder> first, which leaves"
    " such rows out and no others"
)


@dataclass(frozen=True)
class RowPiece:
    """A complete document.

    Attributes:
        name: Location of the row.
        text: Complete text.
        ends_document: Always True: each document is one piece.
    """

    name: str
    text: str
    ends_document: bool = True

    @property
    def num_bytes(self) -> int:
        """Size, roughly."""
        return len(self.text)

    def read(self) -> str:
        """Return the text."""
        return self.text

    def text_key(self) -> int:
        """Return the hash of the text."""
        return hash_text(self.text)


class RowCorpus:
    """Rows with a text field, as documents to tokenize.

    Args:
        rows: Source of the rows.
        text_field: Name of the field.
        cache_dir: Folder of cached tokenizers and tokens.
        open_all: Returns the rows with all fields, of which an error names those with text.
    """

    def __init__(self, rows: Rows, *, text_field: str, cache_dir: Path, open_all: Callable[[], Rows]) -> None:
        self.cache_dir = cache_dir
        self.content_hash = f"{rows.content_hash(cache_dir)} {text_field}"
        self._rows = rows
        self._text_field = text_field
        self._open_all = open_all

    @property
    def num_bytes(self) -> int:
        """Approximate size of the rows."""
        return self._rows.num_bytes

    def texts(self, max_bytes: int) -> Iterator[str]:
        """Yield all documents in order, or evenly spaced ones with about `max_bytes` in total."""
        fraction = min(1.0, max_bytes / max(1, self.num_bytes))
        num_seen = num_read = 0
        for piece in self.pieces():
            if num_read <= num_seen * fraction and num_read < max_bytes:
                num_read += piece.num_bytes
                yield piece.text
            num_seen += piece.num_bytes

    def pieces(self, *, cut: bool = True) -> Iterator[RowPiece]:
        """Yield the non-empty documents."""
        has_text = False
        for row in self._rows:
            try:
                text = read_text(row, self._text_field)
            except ConfigError as mistake:
                if isinstance(mistake.__cause__, UnicodeDecodeError) and row.from_table:
                    raise self._explain_bytes(mistake, row, mistake.__cause__) from mistake
                if has_text or (found := self._explain(mistake)) is None:
                    raise
                raise found from mistake
            has_text = True
            if text:
                yield RowPiece(row.place, text)

    def _explain_bytes(self, mistake: ConfigError, row: Row, error: UnicodeDecodeError) -> ConfigError:
        """Return the error for text of a table in another encoding, with the command that decodes all rows."""
        is_typed = os.path.isfile(os.path.expanduser(self._rows.name))  # and not one file of several
        if row.path is None or not is_typed or row.path.suffix.lower() not in _PANDAS:
            return mistake
        encoding = guess_encoding(error.object)
        value = f"x.decode('{encoding or UNKNOWN}') if isinstance(x, bytes) else x"
        changed = f"t[sys.argv[2]] = [{value} for x in t[sys.argv[2]]]"
        fix = f"{_rewrite(row.path, changed, self._text_field)}; or {mistake.fix}"
        looks = "" if encoding is None else f"; it looks like {encoding}"
        return ConfigError(mistake.setting, f"{mistake.reason}{looks}", fix)

    def _explain(self, mistake: ConfigError) -> ConfigError | None:
        """Return the error of the first row as one of the whole field; None if a row that is looked at has text."""
        if NEW_FILE in mistake.fix:  # the command that makes rows of what is there
            return None
        fields_with_text: dict[str, None] = {}
        num_rows = 0
        for row in islice(self._open_all(), _MAX_LOOKED_AT):
            num_rows += 1
            try:
                fields = row.parse()
            except ConfigError:
                return None
            if self._text_field not in fields or isinstance(fields[self._text_field], str | bytes):
                return None
            fields_with_text |= {name: None for name, value in fields.items() if isinstance(value, str) and value}
        every = (
            f"the same is true of all {num_rows:,} rows that were looked at" if num_rows > 1 else "it is the only row"
        )
        named = [type_setting("data.text_field", name) for name in [*fields_with_text][:_SHOWN_FIELDS]]
        fix = ", or ".join([*named, f"data.path=<rows with text in {self._text_field}>"])
        return ConfigError(mistake.setting, f"{mistake.reason}; {every}", fix)

    def make_split(self, val_fraction: float) -> Callable[[Any], bool]:
        """Return a predicate for validation documents, by a hash of the text so that duplicates share a split."""
        limit = int(val_fraction * 2.0**64)

        def is_val(piece: RowPiece) -> bool:
            return piece.text_key() < limit

        return is_val

    def check_unchanged(self) -> None:
        """Do nothing: rows are checked while they are read."""


def read_text(row: Row, field: str) -> str:
    """Return the text of a row; bytes are decoded, as older writers of Parquet do not mark text as such.

    Raises:
        ConfigError: The row has no such field, or it is not text.
    """
    fields = row.parse()
    texts = {name: value for name, value in fields.items() if isinstance(value, str) and name != field}
    longest = max(texts, key=lambda name: len(texts[name]), default="")
    other = f"{type_setting('data.text_field', longest)}, or " if texts else ""
    if field not in fields:
        reason = f"it has no field {field}; its fields are {', '.join(fields) or 'none'}"
        fix = f"{other}a row with {field}"
        if isinstance(_find_inner(fields, field), str) and row.path is not None:
            reason += ", and a field within another one is not read"
            fix = _take_out(field, row.path, is_table=row.from_table)
        elif (name := find_list(row)) is not None and row.path is not None:
            reason += f", and {name} is a list of rows"
            fix = convert(f"jq -c {for_shell(f'.[{json.dumps(name, ensure_ascii=False)}][]')}", row.path)
        raise ConfigError(row.place, reason, fix)
    value = fields[field]
    try:
        value = value.decode("utf-8") if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        reason = f"its field {field} has bytes that are not UTF-8 text ({error.reason})"
        raise ConfigError(row.place, reason, f"{other}{_DROP}") from error
    if isinstance(value, Mapping) and row.path is not None and {*value} == {*map(str, range(len(value)))} != set():
        reason = f"its field {field} holds the texts of all rows by number, as pandas.to_json writes them"
        code = f"import pandas, sys; pandas.read_json(sys.stdin.buffer, dtype=False).{_TO_ROWS}"
        raise ConfigError(row.place, reason, convert(python(code), row.path))
    if not isinstance(value, str):
        raise ConfigError(row.place, f"its field {field} is {name_type(value)}, not text", f"{other}{_DROP}")
    return value


def _find_inner(fields: Any, name: str) -> Any:
    """Return the value at a path of names with dots; None if there is none."""
    for part in name.split("."):
        fields = fields.get(part) if isinstance(fields, Mapping) else None
    return fields


def _take_out(field: str, path: Path, *, is_table: bool) -> str:
    """Return the command that gives rows a field of their own for one within another field."""
    parts = field.split(".")
    if is_table:
        changed = "t[sys.argv[2]] = [functools.reduce(lambda a, b: a[b], sys.argv[4:], x) for x in t[sys.argv[3]]]"
        return _rewrite(path, changed, field, *parts)
    names = "".join(f"[{json.dumps(name, ensure_ascii=False)}]" for name in parts)
    query = f". + {{{json.dumps(field, ensure_ascii=False)}: .{names}}}"
    return convert(f"jq -c {for_shell(query)}", path)


def _rewrite(path: Path, changed: str, *names: str) -> str:
    """Return the command that writes a table as rows of JSON, with a changed column.

    Args:
        path: The table.
        changed: Statement on the table `t`; names are in `sys.argv[2:]`.
        names: Fields.
    """
    read = _PANDAS.get(path.suffix.lower(), "read_parquet")
    code = f"import functools, pandas, sys; t = pandas.{read}(sys.argv[1]); {changed}; t.{_TO_ROWS}"
    return f"{python(code, path, *names)} {NEW_FILE}"
