"""Read rows of a CSV file with the names in its first line; a cell without text is null, as in a column of Parquet."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from recipes.data.text.corpus import not_utf8
from recipes.errors import ConfigError

SUFFIXES = (".csv", ".tsv")
_DELIMITERS = (",", ";", "\t")  # of spreadsheets; the one that the names are separated by
_MAX_CELL_CHARACTERS = 1 << 30  # 131,072 by default, less than a long document


def read_csv(file: BinaryIO, *, path: Path, name: str, setting: str) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Yield the cells of each row by the name of their column, with the line where it begins.

    Args:
        file: Unpacked content.
        path: File, for errors.
        name: Name of the file in errors about a row.
        setting: Config key of the path.

    Raises:
        ConfigError: It is not UTF-8, a name is missing or twice, or a row has more or fewer cells than there are names.
    """
    csv.field_size_limit(_MAX_CELL_CHARACTERS)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    copy = f"{setting}=<a table with a name for each column in its first line>"
    try:
        first = text.readline()
        delimiter = max(_DELIMITERS, key=first.count)
        names = next(csv.reader([first], delimiter=delimiter, strict=True), [])
        unnamed = [shown for shown in names if not shown.strip() or names.count(shown) > 1]
        if not names or unnamed:
            what = f"has the name {unnamed[0]!r} twice, or none" if unnamed else "has no names of columns"
            raise ConfigError(f"{setting}={path}", f"its first line {what}", copy)
        rows, begin = csv.reader(text, delimiter=delimiter, strict=True), 2
        for cells in rows:
            if cells and len(cells) != len(names):
                reason = f"it has {len(cells)} cells, and the first line names {len(names)} columns"
                fix = 'quotes around a cell that holds the delimiter or a line break, as in "a, b"'
                raise ConfigError(f"{name}:{begin}", reason, fix)
            if any(cells):
                yield begin, {column: cell or None for column, cell in zip(names, cells, strict=True)}
            begin = rows.line_num + 2  # counted without the first line
    except UnicodeDecodeError as error:
        raise not_utf8(path, error, setting=setting) from error
    except csv.Error as error:
        raise ConfigError(f"{setting}={path}", f"it is no CSV: {error}", copy) from error
