"""A disk that is full for one write of one file: the kernel rejects it, and the next file that is opened finds room."""

import contextlib
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class FullDisk:
    """Rejects chosen writes below a folder, and counts all.

    Every file that Python opens for writing is seen; from then until the next one is opened, no file may grow beyond
    the size that this one has. That holds for writes by libraries, too. `.name.tmp` counts as `name`, and the files of
    all steps as one.

    Args:
        folder: Folder to watch.
        is_full: Takes the path below the folder and how many times it has been opened before; returns whether the
            write is to fail.

    Attributes:
        opened: Number of times that each path was opened for writing.
        rejected: Paths whose writes were rejected.
    """

    def __init__(self, folder: Path, is_full: Callable[[str, int], bool]) -> None:
        self._folder = f"{folder.resolve()}{os.sep}"
        self._is_full = is_full
        self.opened: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self._rejects = False
        self._unfinished: str | None = None

    def see(self, path: str) -> None:
        """Note that a file is about to be opened for writing."""
        _allow(resource.RLIM_INFINITY)
        full = os.path.abspath(path)
        if not full.startswith(self._folder):
            return
        name = self._get_name(full)
        is_same = full == self._unfinished and os.path.exists(full)  # created, and now filled
        self._unfinished = full if full.endswith(".tmp") else None
        if not is_same:
            self._rejects = self._is_full(name, self.opened[name])
            self.opened[name] += 1
            self.rejected[name] += self._rejects
        if self._rejects:
            _allow(os.path.getsize(full) if os.path.exists(full) else 0)

    def _get_name(self, full: str) -> str:
        folder, name = os.path.split(full[len(self._folder) :])
        if name.startswith(".") and name.endswith(".tmp"):
            name = re.sub(r"\.[0-9a-f]{32}$", "", name[1:-4])
        below = re.sub(r"step_\d+(\.ckpt)?(\.tmp)?|/\.unfinished(\.\w+)?\.tmp", "step", f"{folder}/{name}")
        return re.sub(r"/\d+/\d+\.bin$|_\d+$|\.out\.tfevents.*$", "", below).lstrip("/")


_active: FullDisk | None = None
_is_hooked = False


@contextlib.contextmanager
def full_disk(folder: Path, is_full: Callable[[str, int], bool] = lambda path, number: False) -> Iterator[FullDisk]:
    """Reject writes below a folder, see `FullDisk`."""
    global _active, _is_hooked
    if not _is_hooked:
        sys.addaudithook(_hook)  # there is no way to remove one
        _is_hooked = True
    _active = disk = FullDisk(folder, is_full)
    try:
        yield disk
    finally:
        _active = None
        _allow(resource.RLIM_INFINITY)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _active is None or event != "open":
        return
    path, _, flags = arguments
    if isinstance(path, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    _active.see(os.fsdecode(path))


def _allow(num_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes if hard == resource.RLIM_INFINITY else hard, hard))
