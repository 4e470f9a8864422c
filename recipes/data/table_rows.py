"""Read rows of Parquet and Arrow files as plain data, the columns that are needed."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.data.file_kinds import PARQUET
from recipes.errors import ConfigError, type_extra, type_setting
from recipes.foreign_file import describe_error

BATCH_ROWS = 1024  # rows in memory at a time
_STATE = "state.json"  # beside the .arrow files of a folder that `datasets` saved


def read_table(
    path: Path, head: bytes, *, name: str, setting: str, fields: Sequence[str] | None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet or Arrow file; text that is not UTF-8 as bytes.

    Args:
        path: The file.
        head: Its first bytes.
        name: Name of the file, for errors.
        setting: Config key of the path, for errors.
        fields: Columns that are needed; None: all.

    Raises:
        ConfigError: pyarrow is not installed, two columns have one name, a column cannot be read, or the file is a part
            of a saved dataset.
    """
    kind = "Parquet" if head.startswith(PARQUET) else "Arrow"
    try:
        import pyarrow.parquet
    except ImportError as error:
        reason = f"{kind} files need the package pyarrow, which is not installed"
        raise ConfigError(f"{setting}={path}", reason, type_extra("datasets")) from error
    if kind == "Arrow":
        if path.with_name(_STATE).is_file():
            reason = f"it is a part of a dataset that datasets saved, whose rows are chosen and ordered by {_STATE}"
            raise ConfigError(f"{setting}={path}", reason, type_setting(setting, f"hf://{path.parent}"))
        for batch in _arrow_batches(path, fields, name):
            yield from list_rows(batch, name)
        return
    # Spark and others write a checksum of each page: without it, text with other letters is still text
    file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    names = choose_columns(file.schema_arrow.names, fields, name)
    try:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=names):
            yield from list_rows(batch, name)
    except ConfigError:
        raise
    except Exception as error:
        column = _find_unreadable(file, names)
        if column is None:
            raise
        raise _bad_column(name, column, error, is_needed=fields is not None and column in fields) from error


def _arrow_batches(path: Path, fields: Sequence[str] | None, name: str) -> Iterator[Any]:
    """Yield parts of an Arrow file or stream, mapped into memory."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as mapped:
        try:
            reader = pyarrow.ipc.open_file(mapped)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:  # without the index at the end of a file: a stream
            mapped.seek(0)
            batches = reader = pyarrow.ipc.open_stream(mapped)
        names = choose_columns(reader.schema.names, fields, name)
        for batch in batches:
            chosen = batch.select(names)
            check_offsets(chosen)
            for start in range(0, len(chosen), BATCH_ROWS):
                yield chosen.slice(start, BATCH_ROWS)


def check_offsets(table: Any) -> None:
    """Check that the texts and lists of an Arrow table or batch are where its bytes are: others are read from anywhere.

    About 5 GB/s. Text that is not UTF-8 passes: `list_rows` returns it as bytes.

    Raises:
        pyarrow.ArrowInvalid: They are not.
    """
    import pyarrow

    for name, column in zip(table.schema.names, table.columns, strict=True):
        try:
            column.validate(full=True)
        except pyarrow.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise pyarrow.ArrowInvalid(f"column {name}: {error}") from error


def choose_columns(names: Sequence[str], fields: Sequence[str] | None, place: str) -> list[str]:
    """Return the columns to read: those that are needed; all if one is missing, so that the error can list them.

    Raises:
        ConfigError: Two of them have the same name.
    """
    needed = [name for name in names if fields is not None and name in fields]
    chosen = needed if fields is not None and {*needed} == {*fields} else list(names)
    if twice := [name for name in chosen if chosen.count(name) > 1]:
        reason = f"it has {len([name for name in chosen if name == twice[0]])} columns with the name {twice[0]}"
        raise ConfigError(place, reason, "a copy of the file in which every column has a name of its own")
    return chosen


def list_rows(table: Any, place: str) -> Iterable[dict[str, Any]]:
    """Return the rows of an Arrow table or batch as fields."""
    columns = {name: _list_values(table.column(name), name, place) for name in table.schema.names}
    return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _list_values(column: Any, name: str, place: str) -> list[Any]:
    """Return the values of a column: as text the dates that Python has not, as bytes the text that is not UTF-8."""
    import pyarrow

    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        return [_to_plain(value) for value in column]
    except (OverflowError, ValueError, pyarrow.ArrowException) as error:  # beyond the year 9999, or nanoseconds
        try:
            values = column.cast(pyarrow.string()).to_pylist()
        except pyarrow.ArrowException:
            raise _bad_column(place, name, error, is_needed=False) from error
    return values


def _to_plain(value: Any) -> Any:
    """Return an Arrow value as plain data, in which text that is not UTF-8 is bytes: its row can be named."""
    import pyarrow

    try:
        return value.as_py()
    except UnicodeDecodeError:
        if isinstance(value, pyarrow.StructScalar):
            return {name: _to_plain(inner) for name, inner in value.items()}
        if isinstance(value, pyarrow.ListScalar):
            return [_to_plain(inner) for inner in value.values]
        if isinstance(value, pyarrow.DictionaryScalar):
            return _to_plain(value.value)
        return value.as_buffer().to_pybytes()


def _find_unreadable(file: Any, names: Sequence[str]) -> str | None:
    """Return the first column of a Parquet file that cannot be read by itself."""
    for name in names:
        try:
            for _ in file.iter_batches(batch_size=BATCH_ROWS, columns=[name]):
                pass
        except Exception:  # whatever the library raises; the caller reports its error
            return name
    return None


def _bad_column(place: str, column: str, error: Exception, *, is_needed: bool) -> ConfigError:
    reason = f"its column {column} cannot be read ({describe_error(error)})"
    fix = "another copy of the file"
    return ConfigError(place, reason, fix if is_needed else f"{fix}, or one without {column} where it is not needed")
