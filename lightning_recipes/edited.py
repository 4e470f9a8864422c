"""Import the files of one's own again that were edited since their import, as a new process would read them.

A notebook edits a file and trains again in the process that has imported it. The check of a config reads the file, and
so do the ranks of a run, but Python keeps what it has imported; autoreload sees no edit from before it was loaded.
"""

import ast
import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType

from recipes.errors import ConfigError
from recipes.runtime.own_code import is_own

_Stamp = tuple[int, int]  # nanoseconds and bytes
_HEADER_BYTES = 16  # of a compiled file: magic number, flags, seconds and bytes of its source (PEP 552)
_seen: dict[str, tuple[ModuleSpec, _Stamp]] = {}  # by name: the import and the file that it has read


def reload_edited() -> None:
    """Import edited modules again, and those that use them, which is said in a line.

    Raises:
        ConfigError: Importing one of them again fails.
    """
    own = _list_own()
    edited = {name for name in own if _is_edited(own[name])}
    if not edited:
        return
    imports = {name: _list_imports(module) for name, module in own.items()}
    while more := {name for name in own.keys() - edited if imports[name] & edited}:
        edited |= more
    names = [name for name in own if name in edited]  # what a module imports is in sys.modules before it
    for name in names:
        _reload(own[name])
    print(f"Edited since it was imported, so imported again: {', '.join(names)}", file=sys.stderr)


def remember_imported() -> None:
    """Remember the files of what a call has imported: without a compiled file, nothing else tells of an edit."""
    for module in _list_own().values():
        _is_edited(module)


def _list_own() -> dict[str, ModuleType]:
    """Return the modules of files that are neither installed nor of this project, by name in the order of imports."""
    found = {}
    for name, module in [*sys.modules.items()]:
        spec = getattr(module, "__spec__", None)
        if not isinstance(spec, ModuleSpec) or name in ("__main__", "__mp_main__") or name != spec.name:
            continue
        file = spec.origin or ""
        if file.endswith(".py") and is_own(file) and Path(file).is_file():
            found[name] = module
    return found


def _is_edited(module: ModuleType) -> bool:
    """Return whether the file of a module is another one than it was imported from, and remember it if not."""
    spec = module.__spec__
    assert spec is not None, "only such modules are listed"
    now = _read_stamp(spec)
    known = _seen.get(spec.name)
    if known is not None and known[0] is spec:  # `importlib.reload` makes another spec
        return known[1] != now
    if (compiled := _read_compiled(spec)) is not None and compiled != (now[0] // 10**9 & 0xFFFFFFFF, now[1]):
        return True
    _seen[spec.name] = spec, now
    return False


def _read_stamp(spec: ModuleSpec) -> _Stamp:
    status = Path(str(spec.origin)).stat()
    return status.st_mtime_ns, status.st_size


def _read_compiled(spec: ModuleSpec) -> _Stamp | None:
    """Return seconds and bytes of the source that the newest import has compiled; None if no file has them."""
    if spec.cached is None or not Path(spec.cached).is_file():
        return None
    with Path(spec.cached).open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES or any(header[4:8]):  # of a hash in place of both
        return None
    return int.from_bytes(header[8:12], "little"), int.from_bytes(header[12:16], "little")


def _list_imports(module: ModuleType) -> set[str]:
    """Return the names of the modules that the file of a module imports, and of whatever it takes from them."""
    spec = module.__spec__
    assert spec is not None, "only such modules are listed"
    try:
        parsed = ast.parse(Path(str(spec.origin)).read_bytes())
    except SyntaxError:  # which importing it again reports
        return set()
    found = set[str]()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            source = resolve_name(source, spec.parent) if node.level else source
            found |= {source, *(f"{source}.{each.name}" for each in node.names)}
    return found


def _reload(module: ModuleType) -> None:
    before = module.__spec__
    try:
        importlib.reload(module)
    except Exception as error:
        module.__spec__ = before  # the next call tries again
        raise ConfigError(
            f"{before and before.origin}",
            f"it was edited since it was imported, and importing it again fails: {type(error).__name__}: {error}",
            "the same call once it is corrected, or after a restart of the kernel",
        ) from error
    spec = module.__spec__
    assert spec is not None, "it has just been imported"
    _seen[spec.name] = spec, _read_stamp(spec)
