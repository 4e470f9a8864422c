"""Open a file that may be compressed, by its first bytes, and stop at one that unpacks to far more than it holds."""

import io
from pathlib import Path
from typing import Any, BinaryIO, cast

from typing_extensions import override

from recipes.data.compression import find_compression, unpack
from recipes.data.file_kinds import NUM_HEAD_BYTES, is_text
from recipes.errors import ConfigError, type_extra

_BUFFER_BYTES = 1 << 20
# text is compressed to a fifth, or a fiftieth if it repeats itself; a few kilobytes of a bomb are terabytes of zeros
_MAX_RATIO = 200
_MIN_BYTES_TO_LIMIT = 256 << 20


def open_unpacked(path: Path, setting: str) -> io.BufferedReader:
    """Open a file for reading; a compressed one is unpacked while it is read.

    Args:
        path: The file.
        setting: Config key of its path, for errors.

    Raises:
        OSError: It cannot be read.
        ConfigError: zstd is needed and not installed. On reading: the file unpacks to over 200 times its size.
    """
    plain = path.open("rb")
    head = plain.peek(NUM_HEAD_BYTES)[:NUM_HEAD_BYTES]
    kind = find_compression(head)
    is_damaged = path.name.lower().endswith(".gz") and not is_text(head)
    if kind is None and not is_damaged:
        return plain
    typed = f"{setting}={path}"
    raw = _Unpacking(_unpack(plain, kind or "gzip", typed), plain, path, typed, is_gzip=kind == "gzip")
    return io.BufferedReader(raw, buffer_size=_BUFFER_BYTES)


def _unpack(file: BinaryIO, kind: str, typed: str) -> Any:
    if kind == "gzip":
        import gzip

        return gzip.GzipFile(fileobj=file)
    if kind == "bzip2":
        import bz2

        return bz2.BZ2File(file)
    if kind == "xz":
        import lzma

        return lzma.LZMAFile(file)
    try:
        import pyarrow
    except ImportError as error:
        reason = "files compressed with zstd need the package pyarrow, which is not installed"
        raise ConfigError(typed, reason, type_extra("datasets")) from error
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")


class _Unpacking(io.RawIOBase):
    """Unpacked bytes, as many as text of the file's size may have.

    Args:
        unpacked: Reader of the unpacked bytes.
        packed: The file, closed with this one.
        path: The file.
        typed: Setting that named it, for errors.
        is_gzip: Whether the file begins like one of gzip.
    """

    def __init__(self, unpacked: Any, packed: BinaryIO, path: Path, typed: str, *, is_gzip: bool) -> None:
        super().__init__()
        self._unpacked = unpacked
        self._packed = packed
        self._path = path
        self._is_gzip = is_gzip
        self._typed = typed
        self._num_bytes = 0
        self._max_bytes = max(_MIN_BYTES_TO_LIMIT, _MAX_RATIO * path.stat().st_size)

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        try:
            data = cast(bytes, self._unpacked.read(len(buffer)))
        except OSError as error:  # of gzip; xz and bzip2 ignore what follows
            if not self._is_gzip or not str(error).startswith("Not a gzipped file"):
                raise
            reason = "other bytes follow what is compressed with gzip, which is whole"
            fix = f"{unpack(self._path, 'gzip')}; it leaves them out; or another copy"
            raise ConfigError(self._typed, reason, fix) from error
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            reason = f"it unpacks to more than {self._max_bytes:,} bytes, {_MAX_RATIO} times its size"
            fix = "the path of the unpacked file instead, if it is meant to be so large"
            raise ConfigError(self._typed, reason, fix)
        buffer[: len(data)] = data
        return len(data)

    @override
    def close(self) -> None:
        if not self.closed:
            self._unpacked.close()
            self._packed.close()
        super().close()
