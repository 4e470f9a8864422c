"""Hashes of files by content: ~1 GB/s; those of a large corpus are remembered, one stat each."""

import hashlib
import json
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

MIN_BYTES_TO_REMEMBER = 64 * 1024**2  # below, hashing again is faster than anyone notices
_SETTLED_NS = 2_000_000_000  # a file touched more recently may change again within one clock tick

FileState = tuple[Path, int, int]  # path, size in bytes, time of the last change in ns


def content_digests(files: Sequence[FileState], *, cache_dir: Path) -> list[str]:
    """A hash of each file's content.

    The content decides, never the date. Only for speed, and only where the files have 64 MiB or
    more together, a hash is remembered under (path, size, time of change); a file that changed less
    than two seconds before it was hashed is hashed again the next time.
    """
    if sum(num_bytes for _, num_bytes, _ in files) < MIN_BYTES_TO_REMEMBER:
        return [file_digest(path) for path, _, _ in files]
    names = "\n".join(sorted(str(path.absolute()) for path, _, _ in files))
    key = hashlib.blake2b(names.encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()
    memory = cache_dir / "digests" / f"{key}.json"
    known: dict[str, str] = json.loads(memory.read_text()) if memory.is_file() else {}
    started_ns = time.time_ns()
    digests: list[str] = []
    settled: dict[str, str] = {}
    for path, num_bytes, mtime_ns in files:
        state = f"{num_bytes} {mtime_ns} {path.absolute()}"
        digest = known[state] if state in known else file_digest(path)
        digests.append(digest)
        if mtime_ns < started_ns - _SETTLED_NS:
            settled[state] = digest
    if settled != known:
        _write(memory, json.dumps(settled))
    return digests


def file_digest(path: Path) -> str:
    """The hash of one file, read in bounded memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(text)
    os.replace(temporary, path)
