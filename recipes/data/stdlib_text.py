"""Python's standard library as text: ~10 MB on every machine, tokenized once in ~3 s."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from recipes.data.text.corpus import Document
from recipes.data.text.source import TextSource, list_files
from recipes.errors import ConfigError

# not the library (installed packages), tables and generated help, or mostly data (tests)
_SKIPPED_FOLDERS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "encodings",
        "pydoc_data",
        "lib-dynload",
    }
)
_GENERATED_PREFIX = "_sysconfigdata"  # the build's variables, with the paths of the machine


class StdlibText(TextSource):
    """One document per module; it differs between Python versions, and so does its cache. Arguments: `TextSource`."""

    sample_kind: ClassVar[str] = "tokens"

    def list_documents(self) -> Sequence[Document]:
        """Return every module of the library.

        Raises:
            ConfigError: This Python has its library in an archive, or without sources.
        """
        folder = Path(sysconfig.get_path("stdlib"))
        suffixes = frozenset({".py"})
        files = list_files(folder, suffixes=suffixes, skipped_folders=_SKIPPED_FOLDERS)
        files = [path for path in files if not path.name.startswith(_GENERATED_PREFIX)]
        if not files:
            raise ConfigError(
                "data=stdlib_text",
                f"this Python has no sources in {folder}",
                "data=text_files data.path=<folder of text>",
            )
        return [Document.of(path, name=path.relative_to(folder).as_posix()) for path in files]

    def more_text(self) -> str:
        """Return other data: the library cannot grow."""
        return "data=text_files data.path=<more text>"
