"""Files in any fsspec storage: listed once, copied to a local cache on first read."""

import contextlib
import copy
import fcntl
import hashlib
import logging
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.data.found_files import find_files, skip_unfinished
from recipes.data.token_layout import file_key
from recipes.errors import ConfigError
from recipes.files import format_bytes
from recipes.foreign_file import describe_error
from recipes.home import expand_home

log = logging.getLogger(__name__)

# packages whose name is not that of their module, and those that classes within fsspec import
_PACKAGES = {
    "fsspec_xrootd": "fsspec-xrootd",
    "gdrive_fsspec": "gdrive-fsspec",
    "huggingface_hub": "huggingface-hub",
    "lakefs_spec": "lakefs-spec",
}
_NEEDED_BY_FSSPEC = ("requests", "aiohttp", "paramiko", "smbprotocol", "pygit2", "pyarrow", "distributed")
_PARTIAL = ".partial."


class Storage:
    """The files of one path; local ones are read in place, remote ones from cached copies.

    Picklable: each process opens its own connection.

    Args:
        path: File, folder or glob, optionally with a protocol: `s3://bucket/tokens/*.npy`.
        setting: Config key of the path, such as "data.path".
        suffixes: Of the files that are read from a folder.
        content: What they hold, for errors.
        cache_dir: Folder of cached copies.
        cache_gb: Maximum total size of cached copies; None: unlimited.

    Raises:
        ConfigError: There are no files, or the package for the protocol is missing.
    """

    def __init__(
        self,
        path: str,
        *,
        setting: str,
        suffixes: Sequence[str],
        content: str,
        cache_dir: Path,
        cache_gb: float | None = None,
    ) -> None:
        self.setting = setting
        self._path = path
        self._cache_dir = cache_dir
        self._cache_bytes = None if cache_gb is None else int(cache_gb * 1e9)
        self._connected: tuple[int, Any, str] | None = None  # process, file system, path in it
        fix = f"{setting}=<file, folder or glob of {content}, local or as in s3://bucket/folder>"
        with self._explained(fix):
            files, pattern = self._connect()
            self.is_local = "file" in files.protocol if isinstance(files.protocol, tuple) else files.protocol == "file"
            if self.is_local:
                found = find_files(pattern, setting=setting, fix=fix, suffixes=suffixes, skip=skip_unfinished)
                names = [str(file) for file in found.files]
            else:
                names = [name for name in _list_remote(files, pattern, suffixes) if files.isfile(name)]
            self.names: list[str] = sorted(names)
            self.sizes: list[int] = [int(files.size(name)) for name in self.names]
        if not self.names:
            raise ConfigError(f"{setting}={path}", f"no file there ends in {', '.join(suffixes)}", fix)

    def select(self, indices: Sequence[int]) -> "Storage":
        """Return a storage of some of the files."""
        selected = copy.copy(self)
        selected.names = [self.names[index] for index in indices]
        selected.sizes = [self.sizes[index] for index in indices]
        return selected

    def keys(self) -> list[int]:
        """Return a hash of where each file is, equal for equal files of any path."""
        protocol = "" if self.is_local else f"{self._path.partition('://')[0]}://"
        return [file_key(f"{protocol}{name}") for name in self.names]

    def open_local(self, index: int) -> Path:
        """Return a local path of a file, copying it to the cache if it is remote."""
        name = self.names[index]
        if self.is_local:
            return Path(name)
        target = self._copy_path(index)
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            with _locked(target.with_name(f".{target.name}.lock")):
                if not target.is_file():
                    self._copy(index, target)
        os.utime(target)  # mark as used: the least recently used are deleted first
        return target

    def read_heads(self, num_bytes: int) -> list[bytes]:
        """Return the first bytes of every file, without copying it; from most object stores many at a time."""
        with self._explained(f"{self.setting}=<files that can be read>"):
            files, _ = self._connect()
            ends = [min(num_bytes, size) for size in self.sizes]
            heads: list[bytes] = files.cat_ranges(self.names, [0] * len(ends), ends, on_error="raise")
        return heads

    def read_range(self, index: int, begin: int, end: int) -> bytes:
        """Return bytes of a file, without copying it."""
        with self._explained(f"{self.setting}=<files that can be read>"):
            files, _ = self._connect()
            found: bytes = files.cat_file(self.names[index], start=begin, end=end)
        return found

    @contextlib.contextmanager
    def open_remote(self, index: int) -> Iterator[Any]:
        """Open a file for reading from its beginning on, without copying it."""
        with self._explained(f"{self.setting}=<files that can be read>"):
            files, _ = self._connect()
            with files.open(self.names[index], "rb") as file:
                yield file

    def get_state(self, index: int) -> str:
        """Return a text that changes when a file does: from its size and, where the store has it, time or hash."""
        with self._explained(f"{self.setting}=<files that can be read>"):
            files, _ = self._connect()
            return f"{self.names[index]} {self.sizes[index]} {files.ukey(self.names[index])}"

    def _copy(self, index: int, target: Path) -> None:
        if self._cache_bytes is not None:
            self._make_room(self.sizes[index])
        temporary = target.with_name(f".{target.name}{_PARTIAL}{uuid.uuid4().hex}")
        began = time.monotonic()
        try:
            with self._explained(f"{self.setting}=<files that can be read>"):
                files, _ = self._connect()
                files.get_file(self.names[index], str(temporary))
            if temporary.stat().st_size != self.sizes[index]:
                reason = f"{self.names[index]} has {temporary.stat().st_size:,} bytes, and had {self.sizes[index]:,}"
                raise ConfigError(f"{self.setting}={self._path}", reason, "the same command again")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        log.info("copied %s, %s in %.1f s", target.name, format_bytes(self.sizes[index]), time.monotonic() - began)

    def _make_room(self, num_bytes: int) -> None:
        """Delete the least recently used copies."""
        assert self._cache_bytes is not None
        folder = self._copy_path(0).parent
        copies = [path for path in folder.iterdir() if not path.name.startswith(".")]
        used = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in copies)
        total = num_bytes + sum(size for _, size, _ in used)
        for _, size, path in used:
            if total <= self._cache_bytes:
                return
            path.unlink(missing_ok=True)  # a process that has it open keeps reading it
            total -= size

    def _copy_path(self, index: int) -> Path:
        folder = hashlib.blake2b(self._path.encode(), digest_size=10).hexdigest()
        key = hashlib.blake2b(f"{self.names[index]} {self.sizes[index]}".encode(), digest_size=8).hexdigest()
        return self._cache_dir / "shards" / folder / f"{key}_{Path(self.names[index]).name}"

    def _connect(self) -> tuple[Any, str]:
        # of most stores, a connection does not survive a fork, as of a loader process
        if self._connected is None or self._connected[0] != os.getpid():
            import fsspec

            path = str(expand_home(self._path, self.setting)) if "://" not in self._path else self._path
            self._connected = os.getpid(), *fsspec.core.url_to_fs(path)
        return self._connected[1:]

    @contextlib.contextmanager
    def _explained(self, fix: str) -> Iterator[None]:
        """Convert exceptions of fsspec and its protocols into a ConfigError."""
        try:
            yield
        except ConfigError:
            raise
        except ImportError as error:
            protocol, packages = self._path.partition("://")[0], find_packages(self._path.partition("://")[0])
            reason = f"{protocol}:// needs a package that is not installed ({describe_error(error)})"
            fix = f"pip install {packages}" if packages else fix
            raise ConfigError(f"{self.setting}={self._path}", reason, fix) from error
        except Exception as error:  # each protocol has its own exceptions
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ConfigError(f"{self.setting}={self._path}", f"it cannot be read: {reason}", fix) from error

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_connected": None}


def find_packages(protocol: str) -> str | None:
    """Return the packages that `pip install` takes for a protocol of fsspec; None: unknown.

    fsspec registers the module of its class, or for one of its own a sentence about what that imports.
    """
    from fsspec.registry import known_implementations

    known = known_implementations.get(protocol.rpartition("::")[2], {})
    module = str(known.get("class", "fsspec")).partition(".")[0]
    if module != "fsspec":
        return _PACKAGES.get(module, module)
    named = [name for name in _NEEDED_BY_FSSPEC if name in known.get("err", "")]
    return " ".join(named) or None


def _list_remote(files: Any, pattern: str, suffixes: Sequence[str]) -> list[str]:
    """Return the files of a folder, a glob or a name in a store, without hidden and unfinished ones."""
    if files.isdir(pattern):
        inside = {name: name.removeprefix(pattern.rstrip("/")).split("/") for name in files.find(pattern)}
        return [
            name
            for name, parts in inside.items()
            if name.endswith(tuple(suffixes)) and not any(part.startswith((".", "_")) for part in parts)
        ]
    if not any(mark in pattern for mark in "*?["):
        return [pattern]
    shows_hidden = "/." in pattern
    return [name for name in files.glob(pattern) if shows_hidden or "/." not in name]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that is released when the process dies; without file locks, two processes may copy the same file."""
    with path.open("ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
