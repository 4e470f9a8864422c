"""Python's standard library as a text dataset: ~10 MB, available offline, tokenized once in ~3 s."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from recipes.data.found_files import HIDDEN, list_folder
from recipes.data.text.corpus import Document
from recipes.data.text.source import FileSource
from recipes.errors import ConfigError

_INSTALLED = {"site-packages", "dist-packages", "lib-dynload", "__pycache__"}
_MOSTLY_DATA = {"test", "tests", "idle_test", "encodings", "pydoc_data"}
_SKIPPED_FOLDERS = frozenset(_INSTALLED | _MOSTLY_DATA)
_GENERATED_PREFIX = "_sysconfigdata"  # generated at build time, contains machine-specific paths


def _skip(path: Path) -> str | None:
    is_skipped = path.name in _SKIPPED_FOLDERS or path.name.startswith((".", _GENERATED_PREFIX))
    return HIDDEN if is_skipped else None


class StdlibText(FileSource):
    """One document per module; the content, and so the token cache, depends on the Python version.

    Args: See `TextSource`.
    """

    def list_documents(self) -> Sequence[Document]:
        """Return one document per module of the standard library.

        Raises:
            ConfigError: The standard library is zipped or installed without its .py files.
        """
        folder = Path(sysconfig.get_path("stdlib"))
        files = list_folder(folder, setting="data.path", suffixes=[".py"], skip=_skip).files
        if not files:
            raise ConfigError(
                "data=stdlib_text",
                f"no .py files found in {folder}",
                "data=text_files data.path=<folder of text>",
            )
        return [Document.of(path, name=path.relative_to(folder).as_posix()) for path in files]

    def suggest_more_text(self) -> str:
        """Return the overrides to suggest when the standard library is too small."""
        return "data=text_files data.path=<more text>"
