"""Read constructor signatures from source without importing: the arguments a config node may set. Cached per file."""

import ast
import contextlib
import importlib.util
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

Scope = list[ast.stmt]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """An argument: its annotation as an expression (None without one), and whether it is required."""

    annotation: ast.expr | None
    required: bool


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Arguments of a class or function.

    Attributes:
        parameters: Arguments by name.
        takes_any: Whether it accepts further keywords (`**kwargs`, or a base class that cannot be read).
        constants: Literal class attributes, such as `input_kind`.
    """

    parameters: dict[str, Parameter]
    takes_any: bool = False
    constants: dict[str, object] = field(default_factory=dict)


class TargetNotFoundError(LookupError):
    """A dotted path does not name a class or function with readable source."""


@cache
def read_signature(target: str) -> Signature:
    """Read the signature of a dotted path from its source.

    Re-exports (`from .trainer import Trainer`) are followed; nothing is imported.

    Raises:
        TargetNotFoundError: No such module, or no such name in it.
    """
    module, _, name = target.rpartition(".")
    if not module or not name:
        raise TargetNotFoundError(f"{target!r} is not the dotted path of a class or function")
    path = module_file(module)
    node = find(name, parse(path).body)
    if isinstance(node, ast.ImportFrom):
        return read_signature(import_source(node, name, module, path))
    if isinstance(node, ast.ClassDef):
        return _class_signature(node, module, path)
    if isinstance(node, ast.FunctionDef):
        return _function_signature(node, skip_first=False)
    raise TargetNotFoundError(f"{target}: no class or function {name!r} in {module}")


def find_signature(target: object) -> Signature:
    """Return the signature of a dotted path; empty if it does not exist, which the node check reports."""
    try:
        return read_signature(str(target))
    except TargetNotFoundError:
        return Signature(parameters={})


def module_file(module: str) -> Path:
    root, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(root) if root else None
    except ValueError:  # a namespace that Hydra has made up for its plugins
        spec = None
    if spec is not None and spec.origin is not None and not rest and spec.origin.endswith(".py"):
        return Path(spec.origin)
    if spec is None or not spec.submodule_search_locations:
        raise TargetNotFoundError(f"{module}: no package {root!r} is installed")
    path = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    raise TargetNotFoundError(f"{module}: no such module")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def list_names(module: str) -> list[str]:
    """Return the classes and functions that a module defines or re-exports at module level.

    Raises:
        TargetNotFoundError: There is no such module.
    """
    names: list[str] = []
    for node in parse(module_file(module)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.extend(alias.asname or alias.name for alias in node.names)
    return names


def find(name: str, body: Scope) -> ast.stmt | None:
    """Return the statement at module level that defines or imports a name, also inside `if` and `try`."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return node
        if isinstance(node, ast.If | ast.Try) and (found := find(name, node.body)):
            return found
    return None


def import_source(node: ast.ImportFrom, name: str, module: str, path: Path) -> str:
    original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
    if not node.level:
        return f"{node.module}.{original}"
    parts = module.split(".")
    kept = len(parts) - node.level + (1 if path.name == "__init__.py" else 0)
    return ".".join([*parts[:kept], *([node.module] if node.module else []), original])


def _class_signature(node: ast.ClassDef, module: str, path: Path) -> Signature:
    constants = dict(_literals(node.body))
    init = find("__init__", node.body)
    if isinstance(init, ast.FunctionDef):
        own = _function_signature(init, skip_first=True)
        if not own.takes_any:
            return Signature(parameters=own.parameters, constants=constants)
        base = _base_signature(node, module, path)
        passed = _passed_to_base(init, base)
        inherited = {name: parameter for name, parameter in base.parameters.items() if name not in passed}
        return Signature(
            parameters=inherited | own.parameters,
            takes_any=base.takes_any,
            constants=base.constants | constants,
        )
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = {
            item.target.id: Parameter(annotation=item.annotation, required=item.value is None)
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and "ClassVar" not in ast.unparse(item.annotation)
        }
        return Signature(parameters=fields, constants=constants)
    base = _base_signature(node, module, path)
    return Signature(parameters=base.parameters, takes_any=base.takes_any, constants=base.constants | constants)


def _base_signature(node: ast.ClassDef, module: str, path: Path) -> Signature:
    """Return the signature of the first base class; one that accepts anything if its source cannot be read."""
    for base in node.bases:
        if isinstance(base, ast.Name):
            try:
                return read_signature(f"{module}.{base.id}")
            except TargetNotFoundError:
                break
    return Signature(parameters={}, takes_any=bool(node.bases))


def _passed_to_base(init: ast.FunctionDef, base: Signature) -> set[str]:
    """Return the base class arguments that a constructor passes itself; a node must not set these as well."""
    passed: set[str] = set()
    for call in ast.walk(init):
        if isinstance(call, ast.Call) and re.fullmatch(r"super\(.*\)\.__init__", ast.unparse(call.func)):
            num_positional = sum(not isinstance(argument, ast.Starred) for argument in call.args)
            passed |= {*list(base.parameters)[:num_positional], *(word.arg for word in call.keywords if word.arg)}
    return passed


def _function_signature(node: ast.FunctionDef, *, skip_first: bool) -> Signature:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    parameters = {
        argument.arg: Parameter(annotation=argument.annotation, required=index < num_required)
        for index, argument in enumerate(positional)
        if not (skip_first and index == 0)
    }
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters[argument.arg] = Parameter(annotation=argument.annotation, required=default is None)
    return Signature(parameters=parameters, takes_any=arguments.kwarg is not None)


def _literals(body: Scope) -> list[tuple[str, object]]:
    """Return class attributes whose value is a literal."""
    found: list[tuple[str, object]] = []
    for node in body:
        if not isinstance(node, ast.AnnAssign | ast.Assign) or node.value is None:
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Name):
            with contextlib.suppress(ValueError):  # an expression
                found.append((target.id, ast.literal_eval(node.value)))
    return found
