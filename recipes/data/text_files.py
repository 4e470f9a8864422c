"""Custom text: a file, a folder or a glob of UTF-8 files; bounded memory, one document per file."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.data.file_kinds import NUM_HEAD_BYTES, holds_rows
from recipes.data.found_files import find_files, unreadable
from recipes.data.text.corpus import Document
from recipes.data.text.source import FileSource
from recipes.errors import ConfigError, type_setting
from recipes.files import count

LOGGER = logging.getLogger("lightning_recipes")

# suffixes read from a folder: prose and source code. Tables and markup are more often data than text; a glob reads
# every file that it matches.
_PROSE = ".txt .text .md .markdown .rst .org .tex .adoc"
_CODE = ".py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .kt .js .ts .tsx .go .rs .rb .jl .lua .sh .sql"
TEXT_SUFFIXES = frozenset(f"{_PROSE} {_CODE}".split())
_ROWS = frozenset({".jsonl", ".ndjson", ".jsonlines", ".json", ".parquet"})  # read by data=documents
_MAX_READ = 100  # files whose first bytes are looked at
_FIX = "data.path=<file, folder or 'glob/**/*.txt' of UTF-8 text>"


class TextFiles(FileSource):
    """Reads `path`: a file; a folder, recursively, by suffix; or a glob, `**` included."""

    def __init__(self, *, path: str, **settings: Any) -> None:
        """Store the settings; nothing is read before `prepare`.

        Args:
            path: File, folder or glob; `~` stands for the home folder.
            **settings: As for `TextSource`.
        """
        super().__init__(**settings)
        self.path = path

    def list_documents(self) -> Sequence[Document]:
        """Return the files in the order of their relative paths.

        Raises:
            ConfigError: There are no files, none has a known text suffix, or all are empty.
        """
        elsewhere = dict.fromkeys(_ROWS, f"data=documents {type_setting('data.path', self.path)}")
        found = find_files(
            self.path, setting="data.path", fix=_FIX, suffixes=TEXT_SUFFIXES, reads_any=True, elsewhere=elsewhere
        )
        if num_rows := sum(file.suffix.lower() in _ROWS for file in found.files) or _count_rows(
            found.files[:_MAX_READ]
        ):
            LOGGER.warning(
                "data.path=%s: %s of rows %s read as plain text, with braces and field names; data=documents reads the"
                " text in them",
                *(self.path, count(num_rows, "file"), "is" if num_rows == 1 else "are"),
            )
        documents = [Document.of(file, name=file.relative_to(found.folder).as_posix()) for file in found.files]
        if all(document.num_bytes == 0 for document in documents):
            raise ConfigError(f"data.path={self.path}", "there is no text in it, 0 bytes", _FIX)
        return documents

    def suggest_more_text(self) -> str:
        """Return the override that reads more files."""
        return "data.path=<more text>"


def _count_rows(files: Sequence[Path]) -> int:
    """Return the number of files that hold rows, whatever they are called."""
    num_rows = 0
    for path in files:
        try:
            with path.open("rb") as file:
                num_rows += holds_rows(file.read(NUM_HEAD_BYTES))
        except OSError as error:
            raise unreadable(path, error) from error
    return num_rows
