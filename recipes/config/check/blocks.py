"""Whether a model names its blocks, read from its class's source."""

import ast
from pathlib import Path

from recipes.config.signature import (
    TargetNotFoundError,
    find,
    import_source,
    module_file,
    parse,
)

# bases that bring no blocks, and those alone
_BARE = ("nn.Module", "torch.nn.Module", "Module", "Protocol", "ABC", "Generic")
_SETTERS = ("setattr", "self.add_module", "self.register_module")


def lacks_blocks(target: str) -> bool:
    """Whether a class and all of its bases can be read, and none of them sets `blocks`.

    Args:
        target: Its dotted path.
    """
    module, _, name = target.rpartition(".")
    try:
        path = module_file(module)
        node = find(name, parse(path).body)
        if isinstance(node, ast.ImportFrom):
            return lacks_blocks(import_source(node, name, module, path))
    except TargetNotFoundError:
        return False
    if not isinstance(node, ast.ClassDef) or _sets_blocks(node):
        return False
    return all(_base_lacks_blocks(base, module, path) for base in node.bases)


def _base_lacks_blocks(base: ast.expr, module: str, path: Path) -> bool:
    written = ast.unparse(base).partition("[")[0]
    return written in _BARE or ("." not in written and lacks_blocks(f"{module}.{written}"))


def _sets_blocks(node: ast.ClassDef) -> bool:
    """`self.blocks = …` in any method, or `blocks` as a property or class attribute."""
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            if child.attr == "blocks" and ast.unparse(child.value) == "self":
                return True
        elif isinstance(child, ast.FunctionDef) and child.name == "blocks":
            return True
        elif isinstance(child, ast.Call) and ast.unparse(child.func) in _SETTERS:
            named = [arg.value for arg in child.args if isinstance(arg, ast.Constant)]
            if "blocks" in named:
                return True
    return False
