"""torchvision beside a torch that its compiled part does not fit: without its operators, with all the rest of it.

PyPI's torchvision is compiled for torch with CUDA. Beside a CPU build of torch its library does not load, and
`import torchvision` ends in "operator torchvision::nms does not exist" (pytorch/vision#9085; torchvision 0.28.0), and
with it the import of torchmetrics, Lightning and many models of transformers. Transforms, and the models of timm, need
none of these operators: they are declared without a kernel, so that a call of one says that it has none.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_NAME = "torchvision"
_OPERATORS = re.compile(r'register_meta\("(\w+)"\)|"torchvision::(\w+)"')
_libraries: list[object] = []  # of torch, which forgets the operators of one that is collected


class _Finder(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is imported, whoever imports it first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == _NAME:
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(_NAME)
            if spec is not None and spec.origin is not None:
                _declare_operators(Path(spec.origin).parent)
        return None


def repair() -> None:
    """Let torchvision be imported where its compiled part does not load; nothing is imported until then."""
    if _NAME not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _declare_operators(folder: Path) -> None:
    import torch

    compiled = next(iter(sorted(folder.glob("_C*.so"))), None)
    try:
        if compiled is None:
            raise OSError("it is not there")
        torch.ops.load_library(compiled)
    except OSError:
        library = torch.library.Library(_NAME, "DEF")
        _libraries.append(library)
        found = _OPERATORS.findall((folder / "_meta_registrations.py").read_text(encoding="utf-8"))
        for name in sorted({first or second for first, second in found}):
            library.define(f"{name}() -> ()")
