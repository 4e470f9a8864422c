"""Find the files of a path, which is a file, a folder or a glob, and count what is skipped there."""

import errno
import glob
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from recipes.data.glob_files import expand_glob
from recipes.errors import ConfigError, type_setting
from recipes.files import count
from recipes.home import expand_home

LOGGER = logging.getLogger("lightning_recipes")

PREPARED, SUFFIX_OF_PREPARED = ("report.json", "documents"), ".jsonl"  # what mode=prepare writes into its folder
_REPORT_HEAD = b'{\n "input": "'
_SHOWN_KINDS = 8
HIDDEN, _HIDDEN_FOLDER, _LINK, _PIPE = "hidden", "hidden folder", "link to a folder", "pipe or device"
DESCRIPTION = "description of a dataset"
_BRACES = re.compile(r"\{[^{}]*,[^{}]*\}")
_PLURALS = {
    _HIDDEN_FOLDER: "hidden folders",
    _LINK: "links to a folder",
    _PIPE: "pipes or devices",
    DESCRIPTION: "descriptions of a dataset",
}
_UNREAD = {HIDDEN, _HIDDEN_FOLDER, _LINK, _PIPE}  # by a glob, too
# copies that a Mac packs beside the files of a zip archive, and compiled Python
_NEVER_READ = frozenset({"__MACOSX", "__pycache__"})


@dataclass
class FoundFiles:
    """Files in reading order, and a count of the others.

    Attributes:
        folder: Folder that the names of the files are relative to.
        files: Files in the order of their relative paths.
        skipped: Number of skipped files by kind: a suffix, or "hidden", "link to a folder", "pipe or device".
    """

    folder: Path
    files: list[Path] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def describe_skipped(self) -> str:
        """Return the number of skipped files and of the most frequent kinds: `4 (3 .csv, 1 hidden)`."""
        shown = [count(num, kind, _PLURALS.get(kind, kind)) for kind, num in self.skipped.most_common(_SHOWN_KINDS)]
        return f"{self.skipped.total():,} ({', '.join(shown)}{', …' if len(self.skipped) > _SHOWN_KINDS else ''})"


def skip_hidden(path: Path) -> str | None:
    """Return the kind of a hidden file or folder."""
    return HIDDEN if path.name.startswith(".") else None


def skip_unfinished(path: Path) -> str | None:
    """Return the kind of a hidden file, or one with _, which Spark and Arrow write while they work and for metadata."""
    return HIDDEN if path.name.startswith((".", "_")) else None


def find_files(
    path: str,
    *,
    setting: str,
    fix: str,
    suffixes: Collection[str],
    skip: Callable[[Path], str | None] = skip_hidden,
    reads_any: bool = False,
    elsewhere: Mapping[str, str] | None = None,
) -> FoundFiles:
    """Find the files of a path, and log what is skipped in a folder.

    Args:
        path: A file or a glob, all of whose files are read whatever they are called; or a folder, searched recursively.
        setting: Config key of the path, such as "data.path".
        fix: What to type if there is nothing.
        suffixes: Suffixes of the files to read from a folder, in lower case; names are compared without case.
        skip: Returns the kind of a file or folder in a folder that is not to be read, although its suffix is right;
            None for the others.
        reads_any: Whether a file of another suffix can be read, too.
        elsewhere: What to type instead for a folder of files of other suffixes, by suffix.

    Raises:
        ConfigError: There is no file, or a folder or a link cannot be read.
    """
    typed, expanded = f"{setting}={path}", expand_home(path, setting)
    if os.path.isfile(expanded):
        return FoundFiles(expanded.parent, [expanded])
    if os.path.isdir(expanded):
        if _is_prepared(expanded):
            reason = f"mode=prepare wrote it, and the documents are in its folder {PREPARED[1]}"
            option = "" if SUFFIX_OF_PREPARED in suffixes else "data=documents "
            raise ConfigError(typed, reason, f"{option}{type_setting(setting, os.path.join(path, PREPARED[1]))}")
        found = list_folder(expanded, setting=setting, suffixes=suffixes, skip=skip)
        plain = sorted(suffix for suffix in suffixes if suffix.count(".") == 1)
        reason = f"the folder has no {', '.join(plain)} file"
        if found.skipped:
            reason += f"; skipped: {found.describe_skipped()}"
        others = [kind for kind, _ in found.skipped.most_common() if kind in (elsewhere or {})]
        if elsewhere and others:
            fix = elsewhere[others[0]]
        elif reads_any and any(kind not in _UNREAD for kind in found.skipped):
            fix = f"{type_setting(setting, f'{path}/**/*')} to read every file in it"
    elif glob.has_magic(str(expanded)):
        found, reason = _match(expanded, setting), f"no file matches{_explain_braces(expanded)}"
    else:
        raise ConfigError(typed, describe_missing(expanded), fix)
    if not found.files:
        raise ConfigError(typed, reason, fix)
    if found.skipped:
        LOGGER.info(
            "%s: %s %s read; skipped: %s",
            *(typed, count(len(found.files), "file"), "is" if len(found.files) == 1 else "are"),
            found.describe_skipped(),
        )
    return found


def list_folder(
    folder: Path,
    *,
    setting: str,
    suffixes: Collection[str],
    skip: Callable[[Path], str | None] = skip_hidden,
) -> FoundFiles:
    """Return the files in a folder and its subfolders, see `find_files`; the result may be empty.

    Links to folders are not followed: one to a parent folder would never end.

    Raises:
        ConfigError: A folder cannot be listed, or a link leads nowhere.
    """

    def reject(error: OSError) -> NoReturn:  # os.walk would silently skip it
        raise unreadable(Path(error.filename), error, setting) from error

    found = FoundFiles(folder)
    for directory, subfolders, names in os.walk(folder, onerror=reject):
        kept = []
        for name in subfolders:
            if name in _NEVER_READ or (kind := skip(Path(directory, name))) == HIDDEN:
                found.skipped[_HIDDEN_FOLDER] += 1
            elif kind is not None:
                found.skipped[kind] += 1
            elif os.path.islink(os.path.join(directory, name)):
                found.skipped[_LINK] += 1
            else:
                kept.append(name)
        subfolders[:] = kept
        for name in names:
            file = Path(directory, name)
            if (kind := skip(file)) is not None:
                found.skipped[kind] += 1
            elif not name.lower().endswith(tuple(suffixes)):
                found.skipped[file.suffix.lower() or "without a suffix"] += 1
            elif _is_regular(file, setting):
                found.files.append(file)
            else:
                found.skipped[_PIPE] += 1
    found.files.sort(key=lambda file: file.relative_to(folder).parts)
    return found


def _match(pattern: Path, setting: str) -> FoundFiles:
    try:
        files = sorted({file for file in expand_glob(str(pattern)) if not os.path.isdir(file)})
    except OSError as error:  # also of a folder that disappears meanwhile
        raise unreadable(Path(error.filename or pattern), error, setting) from error
    found = FoundFiles(pattern, [file for file in files if _is_regular(file, setting)])
    if num_other := len(files) - len(found.files):
        found.skipped[_PIPE] = num_other
    if found.files:
        found.folder = Path(os.path.commonpath([file.parent for file in found.files]))
    return found


def _is_prepared(folder: Path) -> bool:
    """Return whether mode=prepare has written a folder."""
    report, documents = (folder / name for name in PREPARED)
    try:
        with report.open("rb") as file:
            return documents.is_dir() and file.read(len(_REPORT_HEAD)) == _REPORT_HEAD
    except OSError:
        return False


def _explain_braces(path: Path) -> str:
    return "; {…,…} is not expanded, a glob has *, ? and [a-z]" if _BRACES.search(str(path)) else ""


def _is_regular(path: Path, setting: str) -> bool:
    """Return whether a path is a file whose content can be read more than once.

    Raises:
        ConfigError: It is a link that leads nowhere, or may not be looked at.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise unreadable(path, error, setting) from error


def describe_missing(path: Path) -> str:
    """Return why a path is neither a file nor a folder to read."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        if getattr(error, "errno", None) == errno.ELOOP:
            return "it is a link that leads back to itself"
        if os.path.islink(path):
            return "it is a link to a file that does not exist"
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        said = getattr(error, "strerror", None) or str(error)
        return f"there is no such file or folder{_explain_braces(path)}" if is_missing else f"it cannot be read: {said}"
    if stat.S_ISFIFO(mode):
        return "it is a pipe, and data is read more than once"
    if stat.S_ISSOCK(mode):
        return "it is a socket, not a file"
    return "it is a device, not a file" if not stat.S_ISDIR(mode) else "it is a folder, not a file"


def unreadable(path: Path, error: Exception, setting: str = "data.path") -> ConfigError:
    """Return the error for a file or folder of the data that cannot be read."""
    if getattr(error, "errno", None) == errno.ELOOP:
        reason = "it is a link that leads back to itself"
        return ConfigError(f"{setting}={path}", reason, f"{setting}=<data that can be read>")
    is_dangling = os.path.islink(path) and not os.path.exists(path)
    said = getattr(error, "strerror", None) or str(error)
    reason = "it is a link to a file that does not exist" if is_dangling else f"it cannot be read: {said}"
    fix = f"{setting}=<data that can be read>, or the same command when this file is gone"
    return ConfigError(f"{setting}={path}", reason, fix)


def make_printable(name: str) -> str:
    """Return a file name as one line of valid text: it may hold any bytes, among them those of a newline."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
