"""Custom text: a file, a folder or a glob of UTF-8 files; bounded memory, one document per file."""

from collections.abc import Sequence
from typing import Any

from recipes.data.found_files import find_files
from recipes.data.text.corpus import Document
from recipes.data.text.source import FileSource
from recipes.errors import ConfigError

# suffixes read from a folder: prose and source code. Tables and markup are more often data than text; a glob reads
# every file that it matches.
_PROSE = ".txt .text .md .markdown .rst .org .tex .adoc"
_CODE = ".py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .kt .js .ts .tsx .go .rs .rb .jl .lua .sh .sql"
TEXT_SUFFIXES = frozenset(f"{_PROSE} {_CODE}".split())
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
        found = find_files(self.path, setting="data.path", fix=_FIX, suffixes=TEXT_SUFFIXES, reads_any=True)
        documents = [Document.of(file, name=file.relative_to(found.folder).as_posix()) for file in found.files]
        if all(document.num_bytes == 0 for document in documents):
            raise ConfigError(f"data.path={self.path}", "there is no text in it, 0 bytes", _FIX)
        return documents

    def suggest_more_text(self) -> str:
        """Return the override that reads more files."""
        return "data.path=<more text>"
