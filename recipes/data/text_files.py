"""Custom text: a file, a folder or a glob of UTF-8 files; bounded memory, one document per file."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.data.glob_files import expand_glob
from recipes.data.text.corpus import Document
from recipes.data.text.source import FileSource, list_files
from recipes.errors import ConfigError

# suffixes read from a folder: prose and source code. Tables and markup are more often data than text; a glob reads
# every file that it matches.
_PROSE = ".txt .text .md .markdown .rst .org .tex .adoc"
_CODE = ".py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .kt .js .ts .tsx .go .rs .rb .jl .lua .sh .sql"
TEXT_SUFFIXES = frozenset(f"{_PROSE} {_CODE}".split())


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
        path = Path(self.path).expanduser()
        if path.is_file():
            files, folder = [path], path.parent
        elif path.is_dir():
            files, folder = list_files(path, suffixes=TEXT_SUFFIXES), path
            if not files:
                shown = " ".join(sorted(TEXT_SUFFIXES))
                raise self._error(
                    f"the folder has no text files (by suffix: {shown})",
                    f"data.path='{self.path}/**/*' to read every file in it",
                )
        else:
            files, folder = self._matches(path)
        documents = [Document.of(file, name=_name(file, folder)) for file in files]
        if all(document.num_bytes == 0 for document in documents):
            raise self._error("there is no text in it, 0 bytes")
        return documents

    def _matches(self, path: Path) -> tuple[list[Path], Path]:
        if not glob.has_magic(str(path)):
            raise self._error("there is no such file or folder")
        files = sorted({file for file in expand_glob(str(path)) if file.is_file()})
        if not files:
            raise self._error("no file matches")
        return files, Path(os.path.commonpath([file.parent for file in files]))

    def suggest_more_text(self) -> str:
        """Return the override that reads more files."""
        return "data.path=<more text>"

    def _error(self, reason: str, fix: str | None = None) -> ConfigError:
        default_fix = "data.path=<file, folder or 'glob/**/*.txt' of UTF-8 text>"
        return ConfigError(f"data.path={self.path}", reason, fix or default_fix)


def _name(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()
