"""Replace and append files such that neither a full disk nor a kill damages what was there.

recipes/ and callbacks/ may not import each other, and callbacks/ is used alone: both have this file, and a test keeps
the two equal. It imports only the standard library.
"""

import contextlib
import errno
import fnmatch
import io
import logging
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

log = logging.getLogger("lightning_recipes")

# causes that are of the disk and not of the program: full, over quota, failing, read-only, over the limit of a file
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG})
_PROBE_BYTES = 64 << 10
_OS_ERROR = re.compile(r"os error (\d+)|errno=(\d+)")  # of Rust and C++ libraries, in their messages
_REPEAT_SECONDS = 600.0  # on a disk that is almost full, a short line fits where a long one did not
_failing: dict[str, set[str]] = {}  # causes by path, of files that cannot be written now
_logged: dict[tuple[str, str], float] = {}  # when a path and a cause were logged, monotonic seconds
_open: set[str] = set()  # paths that were logged, and not yet that they are written again


class WriteError(OSError):
    """A file could not be written for a cause in `DISK_ERRORS`; a failed read may have the same number, EIO."""


@contextlib.contextmanager
def replacing(path: Path, *, fsync: bool = False, is_shared: bool = False) -> Iterator[Path]:
    """Yield the path of a new file beside `path`, which takes its name on success and is removed on failure.

    Readers see the old or the new content, even if the process is killed. The umask decides the file's mode, whoever
    writes it: safetensors alone creates files that only their owner reads.

    Args:
        path: File to write, in an existing folder. A device or a pipe is written to directly.
        fsync: Whether to flush to disk before the rename, for files that must survive a power failure.
        is_shared: Whether other processes may write the same file now; a killed one then leaves its unfinished file.

    Raises:
        OSError: The disk is full or the folder cannot be written to; it names `path`, whose content is still there.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp" if is_shared else f".{path.name}.tmp")
    with _naming(path, unfinished):
        unfinished.unlink(missing_ok=True)  # left by a killed process, or a link in a folder from elsewhere
        unfinished.touch(exist_ok=False)
        mode = _get_mode(unfinished)
    try:
        with _naming(path, unfinished):
            yield unfinished
            _set_mode(unfinished, mode)
            if fsync:
                sync(unfinished)
            unfinished.replace(path)
            if fsync:
                sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def write_atomically(path: Path, text: str, *, fsync: bool = False, is_shared: bool = False) -> None:
    """Write a text file with `replacing`."""
    with replacing(path, fsync=fsync, is_shared=is_shared) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="")


@contextlib.contextmanager
def filling(folder: Path, *, owned: Collection[str] = (), writer: str = "") -> Iterator[Path]:
    """Yield a new folder, which becomes `folder`, or whose files replace those of the same names in it.

    For libraries that write several files of their own. Nothing changes on failure; other files in `folder` stay.

    Args:
        folder: Folder to fill.
        owned: Patterns of names that are removed from `folder` on success, but for those in the new folder.
        writer: Name of this process among those that fill the folder at the same time, such as its rank; the folder
            must exist.

    Raises:
        OSError: The disk is full or the folder cannot be written to.
    """
    is_new = not folder.exists()
    # not beside a folder that exists: it may be on another disk
    inside = f".unfinished.{writer}.tmp" if writer else ".unfinished.tmp"
    unfinished = folder.with_name(f".{folder.name}.tmp") if is_new else folder / inside
    with _naming(folder, unfinished):
        _remove(unfinished)  # left by a killed process, or a link in a folder from elsewhere
        unfinished.mkdir(parents=True)
    try:
        with _naming(folder, unfinished):
            probed = unfinished / ".probe"
            probed.touch()
            mode = _get_mode(probed)
            probed.unlink()
            yield unfinished
            written = [path for path in sorted(unfinished.rglob("*")) if path.is_file()]
            for path in written:
                _set_mode(path, mode)
            if is_new:
                unfinished.rename(folder)
                return
            for path in written:
                target = folder / path.relative_to(unfinished)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
            new = {path.relative_to(unfinished).parts[0] for path in written}
            for path in sorted(folder.iterdir()):
                if path.name not in new and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in owned):
                    _remove(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def append(path: Path, text: str, *, keeps_torn: bool = False) -> None:
    """Append whole lines, all or none; an incomplete last line, left by a kill, is not continued.

    Args:
        path: File to append to; created if necessary.
        text: Lines, each with its end.
        keeps_torn: Whether an incomplete last line gets an end, as in a log; otherwise it is removed, as readers of
            records ignore it.

    Raises:
        OSError: The disk is full or the file cannot be written to; the lines before are still there.
    """
    with _naming(path), path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        torn = _get_torn_bytes(file, end)
        if torn and not keeps_torn:
            end -= torn
            file.truncate(end)
        data = (b"\n" if torn and keeps_torn else b"") + text.encode()
        try:
            _write(file.fileno(), data)
        except OSError:
            file.truncate(end)
            raise


def replace_end(path: Path, text: str, offset: int) -> int:
    """Replace everything from a byte offset on with text.

    Returns:
        The new size of the file in bytes.

    Raises:
        OSError: The disk is full; the file is as it was.
    """
    with _naming(path), path.open("r+b", buffering=0) as file:
        file.seek(offset)
        before, data = file.read(), text.encode()
        file.seek(offset)
        try:
            _write(file.fileno(), data)
        except OSError:
            file.truncate(offset + len(before))
            file.seek(offset)
            _write(file.fileno(), before)  # its blocks are still allocated
            raise
        file.truncate(offset + len(data))
        return offset + len(data)


class LineFile:
    """Appends lines to a file; those that a full disk rejects are kept in memory and written with the next ones.

    Args:
        path: File to append to; its folder is created if necessary.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten: list[str] = []

    def append(self, lines: Sequence[str]) -> None:
        """Append lines, each without its end; a failure is logged, see `tolerating`."""
        self._unwritten += [f"{line}\n" for line in lines]
        self._write()

    def finish(self) -> None:
        """Try once more to write what is left, and log how many lines the file lacks."""
        if self._unwritten:
            self._write()
        if self._unwritten:
            log.error(f"{self.path} lacks its last {count(len(self._unwritten), 'line')}: {get_causes(self.path)}")
            self._unwritten = []

    def _write(self) -> None:
        with tolerating(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self.path, "".join(self._unwritten))
            self._unwritten = []


@contextlib.contextmanager
def tolerating(path: Path) -> Iterator[None]:
    """Log a failed write of `path` instead of raising: once per file and cause, and once when it works again.

    After that the same cause is logged again at the earliest ten minutes later.
    """
    name = str(path)
    try:
        yield
    except OSError as error:
        cause = describe(error)
        causes, now = _failing.setdefault(name, set()), time.monotonic()
        is_due = (name, cause) not in _logged or now - _logged[name, cause] > _REPEAT_SECONDS
        if cause not in causes and is_due:
            causes.add(cause)
            _open.add(name)
            _logged[name, cause] = now
            log.error(f"{path} could not be written: {cause}. The run goes on")
        causes.add(cause)
    else:
        _failing.pop(name, None)
        if name in _open:
            _open.discard(name)
            log.info(f"{path} is written again")


def get_causes(path: Path) -> str:
    """Return why a file cannot be written at present."""
    return ", ".join(sorted(_failing.get(str(path), {"unknown"})))


def describe(error: OSError) -> str:
    """Return the reason of an error without the file's name."""
    return error.strerror or str(error)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, `1 line` or `2 lines`; the plural has an s unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def format_bytes(number: float) -> str:
    """Return a size with its unit: `12 bytes`, `3.4 kB`, or `1,234.5 MB`, which is the largest."""
    if number < 1e3:
        return count(int(number), "byte")
    return f"{number / 1e3:.1f} kB" if number < 1e6 else f"{number / 1e6:,.1f} MB"


def probe(folder: Path) -> None:
    """Write a small file and remove it: a disk that is full or read-only fails now and not after an hour's work.

    Raises:
        OSError: The folder takes no file.
    """
    path = folder / f".probe_{os.getpid()}.tmp"
    try:
        with _naming(folder), path.open("wb", buffering=0) as file:
            _write(file.fileno(), bytes(_PROBE_BYTES))
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def reserve(path: Path, num_bytes: int) -> None:
    """Create a file that takes its space at once: a write to a memory-mapped file without space kills the process.

    Raises:
        OSError: The disk has less space.
    """
    with _naming(path), path.open("wb") as file:
        if num_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)


@contextlib.contextmanager
def _naming(path: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Add to an error the name of `path`, which Python leaves out for a write, and its cause, which libraries hide.

    Args:
        path: File or folder to name.
        unfinished: What is written in its place until it is complete; None if it is written to directly.
    """
    try:
        yield
    except OSError as error:
        is_ours = error.filename is None or Path(error.filename).is_relative_to(unfinished or path)
        if error.errno is None or not is_ours:
            raise
        raise _describe_failure(error.errno, path) from error
    except Exception as error:  # torch, safetensors and SQLite have their own classes
        number = None if unfinished is None else _find_cause(error, unfinished)
        if number is None:
            raise
        raise _describe_failure(number, path) from error


def _describe_failure(number: int, path: Path) -> OSError:
    kind = WriteError if number in DISK_ERRORS else OSError
    return kind(number, os.strerror(number), str(path))


def _find_cause(error: Exception, unfinished: Path) -> int | None:
    """Return the number of the system's error behind that of a library: from its text, or by writing once more."""
    if found := _OS_ERROR.search(str(error)):
        return int(found[1] or found[2])
    try:
        if unfinished.is_dir():
            probe(unfinished)
        else:
            with unfinished.open("ab", buffering=0) as file:
                _write(file.fileno(), bytes(_PROBE_BYTES))
    except OSError as cause:
        return cause.errno if cause.errno in DISK_ERRORS else None
    return None


def _write(descriptor: int, data: bytes) -> None:
    """Write all bytes: a single write may be partial."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _get_torn_bytes(file: io.FileIO, end: int) -> int:
    """Return the length of the last line if it is incomplete, else 0."""
    if end == 0:
        return 0
    start, tail = end, b""
    while start and b"\n" not in tail:
        size = min(start, 1 << 16)
        start -= size
        file.seek(start)
        tail = file.read(size) + tail
    return len(tail) - 1 - tail.rfind(b"\n")


def _get_mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _set_mode(path: Path, mode: int) -> None:
    if _get_mode(path) != mode:  # some file systems have one mode for every file and reject a change
        path.chmod(mode)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
