"""Find the line of somebody's own code in which an error was raised, for the last lines of its report."""

import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGES = tuple(f"{_ROOT / name}/" for name in ("recipes", "callbacks", "lightning_recipes"))
_OTHERS = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_FROZEN = "<"  # of what has no file
# of a process of the loader, whose traceback is the message of another error
_LINE = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)$', re.MULTILINE)


def name_own_code(error: BaseException) -> str | None:
    """Return where an error left code that is neither of this project nor installed: `mine.Rows.__getitem__ failed, …`.

    Returns:
        None if no such code was running.
    """
    for each in reversed([*_chain(error)]):  # what happened first
        for found in reversed([*_LINE.finditer(str(each))]):
            if _is_own(found["file"]):
                last = str(each).strip().splitlines()[-1]
                return f"{found['name']} failed, {found['file']} line {found['line']}: {last}"
        frames = [(frame, line) for frame, line in traceback.walk_tb(each.__traceback__)]
        for frame, line in reversed(frames):
            if _is_own(file := frame.f_code.co_filename):
                name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
                return f"{name} failed, {file} line {line}: {_shorten(each)}"
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_own(file: str) -> bool:
    is_installed = "site-packages" in file or "dist-packages" in file
    is_ours = file.startswith(_PACKAGES) or file == str(_ROOT / "train.py")
    return not (is_installed or is_ours or file.startswith((*_OTHERS, _FROZEN)))


def _shorten(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
