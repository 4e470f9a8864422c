"""Find the line of somebody's own code in which an error was raised, for the last lines of its report."""

import ast
import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGES = tuple(f"{_ROOT / name}/" for name in ("recipes", "callbacks", "lightning_recipes"))
_OTHERS = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_NO_FILE = "<"  # `<frozen importlib._bootstrap>`, and what torch generates
_TYPED = ("<stdin>", "<ipython-input-")  # but these are somebody's
# of a process of the loader, whose traceback is the message of another error
_LINE = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)$', re.MULTILINE)


def describe_error(error: BaseException) -> str:
    """Return an exception in a line, with the code of somebody's own that it left."""
    return name_own_code(error) or _shorten(error)


def name_own_code(error: BaseException) -> str | None:
    """Return where an error left code that is neither of this project nor installed: `mine.Rows.__getitem__ failed, …`.

    Of several exceptions, one the cause of another, it is the last one that left such code: the earlier ones may have
    been handled there.

    Returns:
        None if no such code was running.
    """
    for each in _chain(error):
        for found in reversed([*_LINE.finditer(str(each))]):
            if is_own(found["file"]):
                name = _qualify(found["name"], found["file"], int(found["line"]))
                return f"{name} failed, {found['file']} line {found['line']}: {_shorten(each)}"
        for frame, line in reversed([*traceback.walk_tb(each.__traceback__)]):
            if is_own(file := frame.f_code.co_filename):
                name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
                return f"{name} failed, {file} line {line}: {_shorten(each)}"
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()  # a cause may lead back to its effect: `raise error from error`
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_own(file: str) -> bool:
    """Return whether a file is neither installed nor of this project."""
    is_installed = "site-packages" in file or "dist-packages" in file
    is_ours = file.startswith(_PACKAGES) or file == str(_ROOT / "train.py")
    has_no_file = file.startswith(_NO_FILE) and not file.startswith(_TYPED)
    return not (is_installed or is_ours or has_no_file or file.startswith(_OTHERS))


def _qualify(name: str, file: str, line: int) -> str:
    """Return a function's name with its module and the classes around it, which a traceback leaves out."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return name
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]  # outer ones first
    around = [node.name for node in nodes if node.lineno <= line <= (node.end_lineno or node.lineno)]
    return ".".join([Path(file).stem, *around, name])


def _shorten(error: BaseException) -> str:
    """Return the type and the first line of an exception; of one that holds a traceback, those of its last line."""
    text = str(error).strip()
    if _LINE.search(text):
        return text.splitlines()[-1]
    return "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
