"""Corpus of text files in a fixed order, read in pieces in bounded memory, with a content hash."""

import codecs
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from recipes.data.encodings import explain_not_utf8
from recipes.data.file_kinds import NUM_HEAD_BYTES, recognize
from recipes.data.found_files import unreadable
from recipes.errors import ConfigError
from recipes.files import replacing, tolerating

log = logging.getLogger(__name__)

PIECE_BYTES = 256 * 1024  # encoding takes ~170 bytes of memory per byte of text
# search range for a good cut: a piece is at most twice as long as `PIECE_BYTES`
_CUT_WINDOW_BYTES = PIECE_BYTES

# A newline between two lines that are neither blank nor indented: no pre-tokenizer of a byte-level vocabulary joins
# characters across it, so both parts have the same tokens as the uncut text.
_SAFE_CUT = re.compile(rb"[!-~]\n(?=[!-~])")

MIN_DOCUMENTS_TO_SPLIT = 20

MIN_BYTES_TO_REMEMBER = 64 * 1024**2  # hashing less than this again takes negligible time
_SETTLED_NS = 2_000_000_000  # a file changed more recently may change again within one clock tick


@dataclass(frozen=True)
class Document:
    """One text file, with its name in the cache and in errors."""

    name: str
    path: Path
    num_bytes: int
    mtime_ns: int
    ctime_ns: int = field(default=0, compare=False)  # also changes with its name or rights

    @classmethod
    def of(cls, path: Path, *, name: str) -> "Document":
        """Return the document of a file, with its current size and change time.

        Raises:
            ConfigError: The file cannot be read, or is a broken link.
        """
        try:
            status = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        return cls(name, path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def check_unchanged(self, setting: str = "data.path") -> None:
        """Check that the file has not changed since it was listed; `setting` is the config key of its path.

        Raises:
            ConfigError: The file has changed.
        """
        if Document.of(self.path, name=self.name) != self:
            fix = "the same command again, when nothing writes to it any more"
            raise ConfigError(f"{setting}={self.path}", "the file changed while it was being read", fix)


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a document: complete lines if it has lines, always complete characters."""

    document: Document
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Name of the document."""
        return self.document.name

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start

    @property
    def ends_document(self) -> bool:
        """Whether this is the last piece of the document."""
        return self.stop == self.document.num_bytes

    def text_key(self) -> int:
        """Return the hash of the whole document, as `hash_text` gives it for its text."""
        digest = file_digest(self.document.path, num_bytes=8, skips_mark=True)
        return int.from_bytes(bytes.fromhex(digest), "little")

    def read(self) -> str:
        """Return the text.

        Raises:
            ConfigError: The bytes are not UTF-8; names the file and the offset of the first invalid byte.
        """
        try:
            with self.document.path.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.stop - self.start)
        except OSError as error:
            raise unreadable(self.document.path, error) from error
        if self.start == 0:
            reject_other_kind(self.document.path, data)
        try:
            text = data.decode("utf-8")
            return text.removeprefix("\ufeff") if self.start == 0 else text  # a byte order mark is no text
        except UnicodeDecodeError as error:
            raise not_utf8(self.document.path, error, start=self.start) from error


class Corpus:
    """Files in order, with a hash and a validation split that depend on their content.

    Args:
        documents: Documents in the order of tokenization; empty ones are dropped.
        cache_dir: Folder of cached digests, tokenizers and tokens.
    """

    def __init__(self, documents: Sequence[Document], *, cache_dir: Path) -> None:
        self.documents = [document for document in documents if document.num_bytes > 0]
        self.cache_dir = cache_dir
        self.num_bytes = sum(document.num_bytes for document in self.documents)

    @cached_property
    def digests(self) -> list[str]:
        """Hash of each document's content."""
        return content_digests(self.documents, cache_dir=self.cache_dir)

    @cached_property
    def content_hash(self) -> str:
        """Hash of all names and contents, in order, independent of the folder of the files."""
        digest = hashlib.blake2b(digest_size=16)
        for document, content in zip(self.documents, self.digests, strict=True):
            line = f"{content} {document.num_bytes} {document.name}\0"
            digest.update(line.encode("utf-8", "surrogateescape"))  # file names may hold arbitrary bytes
        return digest.hexdigest()

    def make_split(self, val_fraction: float) -> Callable[[Any], bool]:
        """Return a predicate for pieces of validation documents."""
        held_out = self.val_documents(val_fraction)
        return lambda piece: piece.name in held_out

    def val_documents(self, val_fraction: float) -> frozenset[str]:
        """Return the names of the validation documents, about `val_fraction` of all bytes.

        Documents are chosen in the order of their content hashes until the fraction is reached: the choice does not
        depend on seed or folder, duplicates stay in one split, and a new document moves few others. A document larger
        than the whole fraction is never chosen. The result is empty if there are fewer than 20 documents or none is
        small enough; then the tail of the tokens is used for validation.
        """
        if len(self.documents) < MIN_DOCUMENTS_TO_SPLIT:
            return frozenset()
        max_val_bytes = self.num_bytes * val_fraction
        copies: dict[str, list[Document]] = {}
        for digest, document in zip(self.digests, self.documents, strict=True):
            copies.setdefault(digest, []).append(document)
        chosen: set[str] = set()
        num_chosen_bytes = 0
        for digest in sorted(copies):
            num_bytes = sum(document.num_bytes for document in copies[digest])
            if num_bytes <= max_val_bytes:
                num_chosen_bytes += num_bytes
                chosen.update(document.name for document in copies[digest])
            if num_chosen_bytes >= max_val_bytes:
                break
        return frozenset(chosen)

    def pieces(self, *, cut: bool = True) -> Iterator[Piece]:
        """Yield all documents in pieces of about 256 KiB; with `cut=False`, one piece per document."""
        for document in self.documents:
            starts = [0, *(_cuts(document) if cut else ()), document.num_bytes]
            for start, stop in pairwise(starts):
                yield Piece(document, start, stop)

    def texts(self, max_bytes: int) -> Iterator[str]:
        """Yield all pieces in order, or evenly spaced ones with about `max_bytes` in total."""
        fraction = min(1.0, max_bytes / max(1, self.num_bytes))
        num_seen = num_read = 0  # bytes
        for piece in self.pieces():
            if num_read <= num_seen * fraction:
                num_read += piece.num_bytes
                yield piece.read()
            num_seen += piece.num_bytes

    def check_unchanged(self) -> None:
        """Check that no file has changed since it was hashed.

        Raises:
            ConfigError: A file has changed since.
        """
        for document in self.documents:
            document.check_unchanged()


def _cuts(document: Document) -> Iterator[int]:
    """Yield the offsets at which a long document is cut; reads only the bytes around each."""
    if document.num_bytes <= PIECE_BYTES:
        return
    with document.path.open("rb") as file:
        start = 0
        while document.num_bytes - start > PIECE_BYTES:
            target = start + PIECE_BYTES - 1
            file.seek(target)
            window = file.read(_CUT_WINDOW_BYTES)
            cut = _best_cut(window, is_last=target + len(window) >= document.num_bytes)
            if cut is None:
                return
            start = target + cut
            yield start


def _best_cut(window: bytes, *, is_last: bool) -> int | None:
    """Return the offset in a window at which to cut, at least 1; None: the rest stays one piece."""
    match = _SAFE_CUT.search(window)
    if match is not None:
        return match.end()
    if is_last:
        return None
    after_line = window.find(b"\n") + 1
    if after_line > 0:
        return after_line
    starts = (i for i, byte in enumerate(window) if i > 0 and byte & 0xC0 != 0x80)
    return next(starts, len(window))  # first byte of a character; without one, the text is not UTF-8 anyway


def content_digests(documents: Sequence[Document], *, cache_dir: Path) -> list[str]:
    """Return a hash of each file's content.

    If the files total 64 MiB or more, hashes are cached by (path, size, times of change); a file that changed less than
    two seconds before it was hashed is hashed again the next time.
    """
    if sum(document.num_bytes for document in documents) < MIN_BYTES_TO_REMEMBER:
        return [file_digest(document.path) for document in documents]
    names = "\n".join(sorted(str(document.path.absolute()) for document in documents))
    key = hashlib.blake2b(names.encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()
    memory = cache_dir / "digests" / f"{key}.json"
    known = _read_digests(memory)
    started_ns = time.time_ns()
    digests: list[str] = []
    settled: dict[str, str] = {}
    for document in documents:
        state = f"{document.num_bytes} {document.mtime_ns} {document.ctime_ns} {document.path.absolute()}"
        digest = known[state] if state in known else file_digest(document.path)
        digests.append(digest)
        if max(document.mtime_ns, document.ctime_ns) < started_ns - _SETTLED_NS:
            settled[state] = digest
    if settled != known:
        with tolerating(memory):
            _write(memory, json.dumps(settled))
    return digests


def _read_digests(memory: Path) -> dict[str, str]:
    """Return the cached hashes; if their file is damaged, log it and return none."""
    try:
        known = json.loads(memory.read_text(encoding="utf-8")) if memory.is_file() else {}
    except ValueError:
        known = None
    if not isinstance(known, dict):
        log.warning("%s is damaged and is replaced", memory)
        return {}
    return known


def file_digest(path: Path, *, num_bytes: int = 16, skips_mark: bool = False) -> str:
    """Return the hash of one file, with or without a byte order mark, read in bounded memory."""
    try:
        with path.open("rb") as file:
            if skips_mark and file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
                file.seek(0)
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=num_bytes)).hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def reject_other_kind(
    path: Path, data: bytes, setting: str = "data.path", *, wanted: str = "file of UTF-8 text"
) -> None:
    """Reject a file that is no UTF-8 text, though its bytes may decode as such, as those of UTF-16 and Git LFS do.

    Args:
        path: The file.
        data: Its first bytes, or all.
        setting: Config key of the path.
        wanted: What is read instead.

    Raises:
        ConfigError: It is compressed, an archive, in another encoding, or was not downloaded.
    """
    if (kind := recognize(data[:NUM_HEAD_BYTES], path, is_text=True, setting=setting)) is not None:
        raise ConfigError(f"{setting}={path}", kind.reason, kind.fix or f"{setting}=<{wanted}>")


def not_utf8(path: Path, error: UnicodeDecodeError, *, start: int = 0, setting: str = "data.path") -> ConfigError:
    """Return the error for a file that is not UTF-8; `start` is the file offset of the decoded bytes."""
    reason, fix = explain_not_utf8(path, error, start=start)
    return ConfigError(f"{setting}={path}", reason, fix)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # other processes may write the same file: each fills one of its own
    with replacing(path, is_shared=True) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
