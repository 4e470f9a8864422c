"""Cache folders built once, by the first process that needs them, under a file lock and then renamed into place.

If a process is killed while building, the kernel releases its lock and the next builder removes its temporary folder;
a half-written folder is never read.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from recipes.errors import ConfigError
from recipes.files import DISK_ERRORS, describe, sync
from recipes.home import expand_home, reject_address

log = logging.getLogger(__name__)
_FIX = "RECIPES_CACHE=<folder> before the command, or data.cache_dir=<folder>"

_LEFTOVER_SECONDS = 24 * 3600.0  # another host's temporary folder counts as abandoned after a day without changes
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def open_cache_dir(cache_dir: str) -> Path:
    """Return the cache folder, creating it if necessary; `~` stands for the home folder.

    Raises:
        ConfigError: The folder cannot be created or written to.
    """
    reject_address(cache_dir, "data.cache_dir")
    path = expand_home(cache_dir, "data.cache_dir").absolute()
    fix = _FIX
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "it is a file, or in a file, and not a folder" if is_file else f"it cannot be created ({error})"
        raise ConfigError(f"data.cache_dir={cache_dir}", reason, fix) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"data.cache_dir={cache_dir}", "it cannot be written to", fix)
    return path


def build_once(target: Path, build: Callable[[Path], None], *, is_complete: Callable[[Path], bool]) -> None:
    """Build `target` unless it is already complete; safe in any number of processes.

    Args:
        target: Folder to build.
        build: Fills an empty temporary folder, which is then renamed to `target`; an exception leaves nothing behind.
        is_complete: Returns whether a folder has all of the files that `build` writes; if not, it is rebuilt.

    Raises:
        ConfigError: The disk is full, fails or is read-only.
    """
    if is_complete(target):
        return
    try:
        _build(target, build, is_complete=is_complete)
    except OSError as error:
        if error.errno not in DISK_ERRORS or (error.filename and not _is_of(Path(error.filename), target)):
            raise
        reason = f"{target} cannot be written: {describe(error)}"
        raise ConfigError(f"data.cache_dir={target.parent}", reason, _FIX) from error


def _is_of(path: Path, target: Path) -> bool:
    return path.is_relative_to(target.parent) or target.is_relative_to(path)


def _build(target: Path, build: Callable[[Path], None], *, is_complete: Callable[[Path], bool]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock")) as is_locked:
        if is_complete(target):
            return
        if is_locked:
            _remove_leftovers(target)
        temporary = target.with_name(f"{_leftover_prefix(target)}{_host()}.{uuid.uuid4().hex}")
        temporary.mkdir()
        try:
            build(temporary)
            _flush(temporary)
            _move_into_place(temporary, target, is_complete=is_complete)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _move_into_place(temporary: Path, target: Path, *, is_complete: Callable[[Path], bool]) -> None:
    if target.exists() and not is_complete(target):
        log.warning("%s is incomplete or damaged and is replaced", target)
        broken = temporary.with_name(f"{temporary.name}.broken")
        target.rename(broken)
        shutil.rmtree(broken)
    try:
        temporary.rename(target)
    except OSError:
        if not is_complete(target):  # if complete, another process finished first, on a file system without locks
            raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock that is released when the process dies; yield False if the file system has no locks."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
            log.info("%s prepares %s; waiting for it", holder, path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
            log.warning("no file locks in %s: every process prepares its own copy", path.parent)
            yield False
            return
        with contextlib.suppress(OSError):  # a full disk: the name is only for those who wait
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            file.flush()
        yield True


def _leftover_prefix(target: Path) -> str:
    return f".{target.name}.tmp."


def _host() -> str:
    return socket.gethostname().replace(os.sep, "_")


def _remove_leftovers(target: Path) -> None:
    """Remove the folders of dead builders; while we hold the lock, no other builder on this host is alive."""
    prefix = _leftover_prefix(target)
    for path in target.parent.iterdir():
        if not path.name.startswith(prefix):
            continue
        is_ours = path.name.startswith(f"{prefix}{_host()}.")
        if is_ours or time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Flush all files to disk before the rename makes them visible."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)
