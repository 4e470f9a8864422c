"""Your own text: a file, a folder or a glob of UTF-8 files; bounded memory, one document a file."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from recipes.data.text.corpus import Document
from recipes.data.text.source import TextSource, list_files
from recipes.errors import ConfigError
from recipes.tokenizer import TokenizerConfig

# What a folder's files must be called to be read: prose and source code. Tables and markup
# dumps are more often data than text; a glob takes whatever it names.
_PROSE = ".txt .text .md .markdown .rst .org .tex .adoc"
_CODE = ".py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .kt .js .ts .tsx .go .rs .rb .jl .lua .sh .sql"
TEXT_SUFFIXES = frozenset(f"{_PROSE} {_CODE}".split())


class TextFiles(TextSource):
    """Reads `path`: a file; a folder, recursively, by suffix; or a glob, `**` included."""

    sample_kind: ClassVar[str] = "tokens"

    def __init__(
        self,
        *,
        path: str,
        tokenizer: TokenizerConfig,
        seq_len: int,
        val_fraction: Annotated[float, "> 0, < 0.9"],
        cache_dir: str,
        vocab_size: int | None = None,
        num_processes: int | None = None,
    ) -> None:
        """Take the settings.

        Args:
            path: File, folder or glob; `~` stands for the home folder.
            tokenizer: Makes the tokenizer, from this text if it is trained.
            seq_len: Tokens a sample.
            val_fraction: Share held out: whole files where there are 20 or more, else the tail.
            cache_dir: Where tokens and tokenizers are kept.
            vocab_size: Ids that the model knows; None: any number.
            num_processes: That tokenize; None: one a core.
        """
        super().__init__(
            tokenizer=tokenizer,
            seq_len=seq_len,
            val_fraction=val_fraction,
            cache_dir=cache_dir,
            vocab_size=vocab_size,
            num_processes=num_processes,
        )
        self.path = path

    def list_documents(self) -> Sequence[Document]:
        """The files, in the order of their relative paths.

        Raises:
            ConfigError: Nothing there, nothing that is text by its name, or nothing in it.
        """
        path = Path(self.path).expanduser()
        if path.is_file():
            files, folder = [path], path.parent
        elif path.is_dir():
            files, folder = list_files(path, suffixes=TEXT_SUFFIXES), path
            if not files:
                shown = " ".join(sorted(TEXT_SUFFIXES))
                raise self._mistake(
                    f"the folder has no text files (by suffix: {shown})",
                    f"data.path='{self.path}/**/*' to read every file in it",
                )
        else:
            files, folder = self._matches(path)
        documents = [Document.of(file, name=_name(file, folder)) for file in files]
        if all(document.num_bytes == 0 for document in documents):
            raise self._mistake("there is no text in it, 0 bytes")
        return documents

    def _matches(self, path: Path) -> tuple[list[Path], Path]:
        if not glob.has_magic(str(path)):
            raise self._mistake("there is no such file or folder")
        files = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        files = [file for file in files if file.is_file()]
        if not files:
            raise self._mistake("no file matches")
        return files, Path(os.path.commonpath([file.parent for file in files]))

    def more_text(self) -> str:
        """More files."""
        return "data.path=<more text>"

    def _mistake(self, why: str, fix: str | None = None) -> ConfigError:
        usual = "data.path=<file, folder or 'glob/**/*.txt' of UTF-8 text>"
        return ConfigError(f"data.path={self.path}", why, fix or usual)


def _name(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()
