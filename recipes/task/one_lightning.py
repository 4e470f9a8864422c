"""Import `pytorch_lightning` as `lightning.pytorch`: most public modules name the first, and a Trainer takes only one.

The two packages have the same source, and each defines every class separately, so that a module of one is no module to
the other. A module that is imported after `import_as_one` gets the classes of this run, whichever it names.
"""

import importlib
import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

_SAME = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def import_as_one() -> None:
    """Import both packages as one from now on; one that has been imported already stays what it is."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module of one package in the other."""

    @override
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        root = fullname.partition(".")[0]
        if root not in _SAME or (root in sys.modules and sys.modules[root] is not sys.modules.get(_SAME[root])):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    @override
    def exec_module(self, module: ModuleType) -> None:
        root, dot, rest = module.__name__.partition(".")
        sys.modules[module.__name__] = importlib.import_module(_SAME[root] + dot + rest)
