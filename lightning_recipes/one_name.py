"""Give every module one name in a process: `lightning_recipes.recipes.build` is the module `recipes.build`.

In a clone, `recipes` and `callbacks` are imported from the folder of train.py. The wheel installs both inside of
`lightning_recipes`, so that it adds one name to an environment. Without what is here, a module would be imported once
per name, and a class of one copy would be none of the other.

`recipes` is the name of the recipes everywhere, because configs, run folders and pickles have it. The callbacks are
`callbacks` where that is this project's folder; elsewhere `lightning_recipes.callbacks`, so that a project may have a
`callbacks` of its own.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent
_INNER = f"{__package__}."
ROOT = _HERE if (_HERE / "recipes" / "__init__.py").is_file() else _HERE.parent  # contains recipes/ and callbacks/


def install() -> None:
    """Start to resolve both names of a module to one; may be called repeatedly."""
    if not any(isinstance(finder, _OneName) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OneName())


class _OneName(MetaPathFinder, Loader):
    """Finds a module that is in the process, or can be imported, under its other name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return a spec that loads the module of the other name; None if `fullname` is the one name that it has."""
        name = _get_name(fullname)
        if name is None or find_spec(name) is None:
            return None
        return ModuleSpec(fullname, self, loader_state=name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module under its own name."""
        module = import_module(spec.loader_state)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has replaced."""
        assert module.__spec__ is not None, "the import system has just set it"
        module.__spec__ = module.__spec__.loader_state


def _get_name(fullname: str) -> str | None:
    """Return the name that a module has instead of `fullname`; None if it is not one of two."""
    inner = fullname.removeprefix(_INNER)
    top = inner.partition(".")[0]
    if top == "recipes" and inner != fullname:
        _import_recipes()
        return inner
    if top != "callbacks":
        return None
    known = sys.modules.get(f"{_INNER}callbacks")  # what was imported first keeps its name
    is_inner = not _is_ours("callbacks") if known is None else known.__name__ != "callbacks"
    if inner != fullname:
        return None if is_inner else inner
    return f"{_INNER}{fullname}" if is_inner and known is not None and _is_ours("callbacks") else None


def _import_recipes() -> None:
    """Import the package `recipes` of this project, wherever another one may be found.

    Raises:
        ImportError: Another one has been imported.
    """
    if "recipes" in sys.modules:
        if not _is_ours("recipes"):
            raise ImportError(
                f"import {__package__}: another package named recipes has been imported, from"
                f" {_get_file(sys.modules['recipes'])}, and configs name the code of this project so;"
                " type: another name for that package, or the command lightning-recipes"
            )
        return
    import_module(f"{_INNER}callbacks")  # under the name that it has without the next line
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # for loader processes, which get the path and not this finder
    spec = spec_from_file_location("recipes", ROOT / "recipes" / "__init__.py")
    assert spec is not None, f"{ROOT} contains recipes/"
    assert spec.loader is not None, "a file of Python has one"
    sys.modules["recipes"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def _is_ours(top: str) -> bool:
    """Return whether a top-level name is, or would be, the package of this project."""
    module = sys.modules.get(top)
    if module is not None:
        return _get_file(module) == str(ROOT / top / "__init__.py")
    spec = PathFinder.find_spec(top)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent == ROOT / top


def _get_file(module: ModuleType) -> str:
    """Return the file of a module, or its folder if it has none."""
    places = [module.__file__] if getattr(module, "__file__", None) else [*getattr(module, "__path__", ["?"])]
    return str(Path(str(places[0])).resolve())
