"""Read constructor signatures from source without importing: the arguments a config node may set. Cached per file."""

import ast
import builtins
import contextlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property, reduce
from pathlib import Path

Scope = list[ast.stmt]

_OWN = ("recipes", "callbacks")  # packages whose annotations are all known to the check
_ROOT = Path(__file__).parents[2]  # contains them
_INSTALLED = "lightning_recipes."  # the package that has them in a wheel
_SCALARS = ("int", "float", "str", "bool")
# names of typing and collections.abc -> those that the check distinguishes
_CONTAINERS = dict.fromkeys(("list", "List", "Sequence", "MutableSequence", "Iterable", "Collection"), "list")
_CONTAINERS |= dict.fromkeys(("dict", "Dict", "Mapping", "MutableMapping"), "dict")
_CONTAINERS |= dict.fromkeys(("tuple", "Tuple"), "tuple")
_PATHS = ("Path", "PathLike")  # a config has them as text
_MAX_ALIASES = 20  # of an alias of an alias, or of one that refers to itself


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """An argument.

    Attributes:
        written: Its annotation as it is written; None without one.
        module: The module that it is written in.
        value: Its default as it is written; None without one.
    """

    written: ast.expr | None
    module: str
    value: ast.expr | None

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.value is None

    @cached_property
    def annotation(self) -> ast.expr | None:
        """Its annotation in the vocabulary of the check; read on first use, because aliases may be in other modules."""
        return None if self.written is None else read_annotation(self.written, self.module)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Arguments of a class or function.

    Attributes:
        parameters: Arguments by name.
        takes_any: Whether it accepts further keywords (`**kwargs`, or a base class that cannot be read).
        constants: Literal class attributes, such as `input_kind`; of a function, what it declares with `declare_mode`.
    """

    parameters: dict[str, Parameter]
    takes_any: bool = False
    constants: dict[str, object] = field(default_factory=dict)


class TargetNotFoundError(LookupError):
    """A dotted path does not name a class or function with readable source.

    Attributes:
        meant: The module with the nearest name; None: there is none like it.
        missing_package: Its top-level package if nobody has that name here; else None.
    """

    missing_package: str | None = None

    def __init__(self, text: str, *, meant: str | None = None) -> None:
        super().__init__(text)
        self.meant = meant


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
        return _function_signature(node, module, skip_first=False)
    for source in _star_imports(module, path):  # `from torch.nn.modules import *`
        with contextlib.suppress(TargetNotFoundError):
            return read_signature(f"{source}.{name}")
    raise TargetNotFoundError(f"{target}: no class or function {name!r} in {module}")


def find_lineage(target: str) -> set[str] | None:
    """Return the dotted paths of a class and of all its bases, each where it is defined.

    Returns:
        None if it is not a class, or if the source of one of these classes cannot be read.
    """
    if target.removeprefix(_INSTALLED).startswith(_OWN):  # one module, whichever name it is imported by
        target = target.removeprefix(_INSTALLED)
    module, _, name = target.rpartition(".")
    try:
        path = module_file(module)
        node = find(name, parse(path).body)
    except TargetNotFoundError:
        return None
    if isinstance(node, ast.ImportFrom):
        return find_lineage(import_source(node, name, module, path))
    if node is None:
        found = (find_lineage(f"{source}.{name}") for source in _star_imports(module, path))
        return next((lineage for lineage in found if lineage is not None), None)
    if not isinstance(node, ast.ClassDef):
        return None
    lineage = {target}
    for base in node.bases:
        of_base = _base_lineage(ast.unparse(base).partition("[")[0], module, path)
        if of_base is None:
            return None
        lineage |= of_base
    return lineage


def find_unwritten(target: str) -> list[str]:
    """Return the abstract methods of a class that neither it nor a base of it implements, as far as is readable."""
    abstract, written = set[str](), set[str]()
    for dotted in find_lineage(target) or ():
        module, _, name = dotted.rpartition(".")
        try:
            node = find(name, parse(module_file(module)).body)
        except TargetNotFoundError:  # of Python itself
            continue
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(item, ast.FunctionDef):
                is_abstract = any("abstractmethod" in ast.unparse(each) for each in item.decorator_list)
                (abstract if is_abstract else written).add(item.name)
            elif isinstance(item, ast.Assign | ast.AnnAssign):  # `losses, example = Other.losses, Other.example`
                written |= {each.id for each in ast.walk(item) if isinstance(each, ast.Name)}
    return sorted(abstract - written)


def _base_lineage(base: str, module: str, path: Path) -> set[str] | None:
    """Return the lineage of a base class by its name in a module: `Base`, or `callbacks.Base`."""
    first, _, rest = base.partition(".")
    if hasattr(builtins, base) or first in ("ABC", "Generic", "Protocol"):
        return {base}
    if not rest:
        return find_lineage(f"{module}.{base}")
    for node in parse(path).body:
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == first for alias in node.names):
            return find_lineage(f"{import_source(node, first, module, path)}.{rest}")
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) == first:
                    return find_lineage(f"{alias.name if alias.asname else first}.{rest}")
    return None


def _star_imports(module: str, path: Path) -> list[str]:
    """Return the modules of which a module imports every name."""
    stars = [node for node in parse(path).body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    return [import_source(node, "*", module, path).removesuffix(".*") for node in stars]


def find_signature(target: object) -> Signature:
    """Return the signature of a dotted path; empty if it does not exist, which the node check reports."""
    try:
        return read_signature(str(target))
    except TargetNotFoundError:
        return Signature(parameters={})


def read_annotation(written: ast.expr, module: str, *, is_own: bool | None = None, depth: int = 0) -> ast.expr:
    """Reduce an annotation to what the check knows: aliases are replaced with what they stand for.

    The result consists of int, float, str, bool, None, Any, Callable, Literal, Annotated, list, dict, tuple, `|`, and
    names of classes. What cannot be read in the code of other packages is `Any`.

    Args:
        written: The annotation in the source.
        module: The module that it is written in.
        is_own: Whether the argument is in a package of this project; None: that of the module.
        depth: Number of aliases that led there.

    Raises:
        AssertionError: It is in a package of this project, and would be accepted with any value.
    """

    is_own = module.partition(".")[0] in _OWN if is_own is None else is_own

    def read(part: ast.expr) -> ast.expr:
        return read_annotation(part, module, is_own=is_own, depth=depth)

    match written:
        case ast.Constant(value=str(source)):
            return read(ast.parse(source, mode="eval").body)
        case ast.Constant():
            return written
        case ast.BinOp(left=left, op=ast.BitOr() as union, right=right):
            return ast.BinOp(left=read(left), op=union, right=read(right))
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            return _read_generic(written, name, inner, read)
        case ast.Name(id=name) if name in _SCALARS:
            return written
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in ("Any", "object"):
            return ast.Name(id="Any")
        case ast.Name(id=name) | ast.Attribute(attr=name) if name == "Callable":
            return ast.Name(id="Callable")
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _PATHS:
            return ast.Name(id="str")
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _CONTAINERS:
            items: list[ast.expr] = [ast.Name(id="Any")] * (2 if _CONTAINERS[name] == "dict" else 1)
            inner = items[0] if len(items) == 1 else ast.Tuple(elts=items)
            return ast.Subscript(value=ast.Name(id=_CONTAINERS[name]), slice=inner)
        case ast.Attribute():  # torch.device
            return written if is_own else ast.Name(id="Any")
        case ast.Name(id=name):
            return _read_name(name, module, is_own, depth)
    return _leave_unread(written, module, is_own)


def _read_generic(written: ast.Subscript, name: str, inner: ast.expr, read: Callable[[ast.expr], ast.expr]) -> ast.expr:
    """Return the annotation of `name[inner]`."""
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if name == "Literal":
        return ast.Subscript(value=ast.Name(id="Literal"), slice=inner)
    if name == "Optional":
        return ast.BinOp(left=read(inner), op=ast.BitOr(), right=ast.Constant(value=None))
    if name == "Union":
        return reduce(lambda left, right: ast.BinOp(left=left, op=ast.BitOr(), right=right), map(read, parts))
    if name == "Annotated":
        return ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[read(parts[0]), *parts[1:]]))
    if name == "Callable":
        return ast.Name(id="Callable")
    if name in _CONTAINERS:
        children = [read(part) for part in parts]
        slice_ = children[0] if len(children) == 1 else ast.Tuple(elts=children)
        return ast.Subscript(value=ast.Name(id=_CONTAINERS[name]), slice=slice_)
    return read(written.value)  # a class with a type argument


def _read_name(name: str, module: str, is_own: bool, depth: int) -> ast.expr:
    """Return what a name stands for in a module: an alias, or a class."""
    try:
        path = module_file(module)
        node = find(name, parse(path).body) or _find_assignment(name, parse(path).body)
        if isinstance(node, ast.ImportFrom) and depth < _MAX_ALIASES:
            source, _, original = import_source(node, name, module, path).rpartition(".")
            return _read_name(original, source, is_own, depth + 1)
    except TargetNotFoundError:  # of an optional package that is not installed, or compiled: a class
        return ast.Name(id=name if is_own else "Any")
    if isinstance(node, ast.ClassDef):
        return ast.Name(id=name if is_own else "Any")
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and depth < _MAX_ALIASES:
        return read_annotation(node.value, module, is_own=is_own, depth=depth + 1)
    return _leave_unread(ast.Name(id=name), module, is_own)


def _find_assignment(name: str, body: Scope) -> ast.stmt | None:
    """Return the statement at module level that assigns to a name."""
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    return None


def _leave_unread(annotation: ast.expr, module: str, is_own: bool) -> ast.expr:
    assert not is_own, f"the config check cannot read the annotation {ast.unparse(annotation)} in {module}"
    return ast.Name(id="Any")


def module_file(module: str) -> Path:
    inner = module.removeprefix(_INSTALLED)
    root, *rest = (inner if inner.startswith(_OWN) else module).split(".")
    if root in _OWN:  # from Python, another package may have the name of one of these
        return _find_file(_ROOT / root, rest, module)
    try:
        spec = importlib.util.find_spec(root) if root else None
    except ValueError:  # a namespace that Hydra has made up for its plugins
        spec = None
    if spec is not None and spec.origin is not None and not rest and spec.origin.endswith(".py"):
        return Path(spec.origin)
    if spec is None or not spec.submodule_search_locations:
        is_of_python = root in sys.stdlib_module_names
        why = f"{root!r} is part of Python itself" if is_of_python else f"no package {root!r} is installed"
        error = TargetNotFoundError(f"{module}: {why}")
        error.missing_package = None if is_of_python or not root.isidentifier() else root
        raise error
    return _find_file(Path(spec.submodule_search_locations[0]), rest, module)


def locate_code(packages: Sequence[str]) -> str:
    """Return the folder that PYTHONPATH lacks for some packages: the working folder if all are there, or what it has.

    Neither `python train.py` nor the installed command searches the working folder.
    """
    are_here = all(Path(f"{name}.py").is_file() or Path(name, "__init__.py").is_file() for name in packages)
    return "." if are_here else f"<the folder with {' and '.join(packages)}>"


def _find_file(package: Path, rest: Sequence[str], module: str) -> Path:
    """Return the file of a module in the folder of its package."""
    path = package.joinpath(*rest)
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    for number, part in enumerate(rest):
        folder = package.joinpath(*rest[:number])
        names = {each.stem for each in folder.iterdir() if each.suffix == ".py" or each.is_dir()}
        if part not in names:
            near = get_close_matches(part, names, 1)
            root = module.split(".")[: -len(rest)]
            meant = ".".join([*root, *rest[:number], *near, *rest[number + 1 :]]) if near else None
            raise TargetNotFoundError(f"{module}: no such module", meant=meant)
    raise TargetNotFoundError(f"{module}: no such module")


def parse(path: Path) -> ast.Module:
    return _parse(path, path.stat().st_mtime_ns)  # in a notebook, a file may change between two runs


@cache
def _parse(path: Path, stamp: int) -> ast.Module:
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
        own = _function_signature(init, module, skip_first=True)
        base = _base_signature(node, module, path)
        if not own.takes_any:
            return Signature(parameters=own.parameters, constants=base.constants | constants)
        calls = _base_calls(init)
        if not any(word.arg is None for call in calls for word in call.keywords):  # its kwargs go elsewhere
            return Signature(parameters=own.parameters, takes_any=True, constants=base.constants | constants)
        passed = _passed_to_base(calls, base)
        inherited = {name: parameter for name, parameter in base.parameters.items() if name not in passed}
        return Signature(
            parameters=inherited | own.parameters,
            takes_any=base.takes_any,
            constants=base.constants | constants,
        )
    if _is_dataclass(node):
        base = _dataclass_signature(node, module, path)
        fields = {
            item.target.id: Parameter(written=item.annotation, module=module, value=item.value)
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and "ClassVar" not in ast.unparse(item.annotation)
        }
        return Signature(parameters=base.parameters | fields, constants=base.constants | constants)
    base = _base_signature(node, module, path)
    return Signature(parameters=base.parameters, takes_any=base.takes_any, constants=base.constants | constants)


_WITHOUT_ARGUMENTS = ("ABC", "Protocol", "object")  # bases of Python itself, whose source is not read


def _base_signature(node: ast.ClassDef, module: str, path: Path) -> Signature:
    """Return the signature of the first base class; one that accepts anything if its source cannot be read."""
    for base in node.bases:
        if isinstance(base, ast.Name):
            if base.id in _WITHOUT_ARGUMENTS:
                return Signature(parameters={})
            try:
                return read_signature(f"{module}.{base.id}")
            except TargetNotFoundError:
                break
    return Signature(parameters={}, takes_any=bool(node.bases))


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _dataclass_signature(node: ast.ClassDef, module: str, path: Path) -> Signature:
    """Return the signature of the first base that is a dataclass, whose fields a dataclass has, too."""
    for base in node.bases:
        if isinstance(base, ast.Name):
            found, where, name = find(base.id, parse(path).body), module, base.id
            while isinstance(found, ast.ImportFrom):
                where, _, name = import_source(found, name, where, module_file(where)).rpartition(".")
                found = find(name, parse(module_file(where)).body)
            if isinstance(found, ast.ClassDef) and _is_dataclass(found):
                return read_signature(f"{where}.{name}")
    return Signature(parameters={})


def _base_calls(init: ast.FunctionDef) -> list[ast.Call]:
    """Return the calls of the base class's constructor: `super().__init__(…)`, or `Base.__init__(self, …)`."""
    calls = [node for node in ast.walk(init) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "__init__"]


def _passed_to_base(calls: Sequence[ast.Call], base: Signature) -> set[str]:
    """Return the base class arguments that a constructor passes itself; a node must not set these as well."""
    passed: set[str] = set()
    for call in calls:
        if re.fullmatch(r"super\(.*\)\.__init__", ast.unparse(call.func)):
            num_positional = sum(not isinstance(argument, ast.Starred) for argument in call.args)
            passed |= {*list(base.parameters)[:num_positional], *(word.arg for word in call.keywords if word.arg)}
    return passed


def _function_signature(node: ast.FunctionDef, module: str, *, skip_first: bool) -> Signature:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    without = [None] * (len(positional) - len(arguments.defaults))
    parameters = {
        argument.arg: Parameter(written=argument.annotation, module=module, value=value)
        for index, (argument, value) in enumerate(zip(positional, [*without, *arguments.defaults], strict=True))
        if not (skip_first and index == 0)
    }
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters[argument.arg] = Parameter(written=argument.annotation, module=module, value=default)
    return Signature(parameters=parameters, takes_any=arguments.kwarg is not None, constants=_declared(node))


def _declared(node: ast.FunctionDef) -> dict[str, object]:
    """Return the keywords of the decorator `declare_mode`, all of them literals."""
    return {
        word.arg: ast.literal_eval(word.value)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "declare_mode"
        for word in decorator.keywords
        if word.arg is not None
    }


def _read_literal(value: ast.expr) -> object:
    """Return the value of a literal, or of a frozenset of one."""
    match value:
        case ast.Call(func=ast.Name(id="frozenset"), args=[members]):
            return frozenset(ast.literal_eval(members))
    return ast.literal_eval(value)


def _literals(body: Scope) -> list[tuple[str, object]]:
    """Return class attributes whose value is a literal."""
    found: list[tuple[str, object]] = []
    for node in body:
        if not isinstance(node, ast.AnnAssign | ast.Assign) or node.value is None:
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Name):
            with contextlib.suppress(ValueError):  # an expression
                found.append((target.id, _read_literal(node.value)))
    return found
