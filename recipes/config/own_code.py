"""Keep a run what it was made with while the files of one's own classes are edited, and say what has changed in them.

A setting that nobody types is a default in the signature of its class. Of classes of this project a run folder has
them all, since conf/ lists them; of one's own, `fill_defaults` puts them into the config of a new run. The definitions
in the files of such classes are hashed into environment.json.
"""

import ast
import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.config.instantiate import TARGET
from recipes.config.overrides import for_shell, make_override
from recipes.config.signature import (
    Parameter,
    TargetNotFoundError,
    find_lineage,
    find_signature,
    import_source,
    module_file,
    parse,
)
from recipes.config.traits import select
from recipes.run_folder import ENVIRONMENT_FILE, read_environment
from recipes.runtime.own_code import is_own

Config = dict[str, Any]
OWN_CODE = "own_code"  # field of environment.json: module -> definition -> hash
_SECTIONS = ("task", "data", "model", "loss")
_MOST_NAMED = 4


def fill_defaults(
    config: Config, composed: Config, read_frozen: Callable[[], Config | None]
) -> tuple[Config, list[str]]:
    """Return a config with the defaults of one's own classes: as they are now, or as a resumed run was made with.

    Only numbers, texts, true and false. A run without them, of an earlier version, goes without.

    Args:
        config: Resolved config.
        composed: What its overrides compose to; what is in it is set by somebody.
        read_frozen: Returns the config of the resumed run; None of a new one.

    Returns:
        The config, and a line for each default that is another one now.
    """
    if not any(_list_own_nodes(config)):
        return config, []
    config, frozen, lines = copy.deepcopy(config), read_frozen(), list[str]()
    for place, node in _list_own_nodes(config):
        before: Any = select(frozen, place) if frozen is not None else None
        is_same = isinstance(before, dict) and before.get(TARGET) == node[TARGET]
        signature, typed = find_signature(node[TARGET]), select(composed, place)
        is_set = typed if isinstance(typed, dict) else {}
        untaken = (
            [] if signature.takes_any or not is_same else [name for name in node if name not in signature.parameters]
        )
        for name in untaken:
            if name not in is_set and isinstance(node[name], int | float | str) and not name.startswith("_"):
                lines.append(
                    f"{place}.{name}={node.pop(name)} is left out: {node[TARGET]} has no such argument any more"
                )
        for name, parameter in signature.parameters.items():
            default = _read_default(parameter)
            if name in is_set or default is None:
                continue
            if frozen is None:
                node[name] = default
            elif is_same and name in before and isinstance(before[name], int | float | str):
                node[name] = before[name]
                if before[name] != default:
                    to_take = for_shell(f"++{make_override(f'{place}.{name}', default)}")
                    lines.append(
                        f"{place}.{name} stays {before[name]}, with which the run was made: the default of"
                        f" {node[TARGET]} is {default} now, which {to_take} takes"
                    )
    return config, lines


def describe_own_code(config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return a hash of each definition in the files of one's own classes, and in those that they import.

    Returns:
        Module -> name of a class, function or variable -> the first digits of its SHA-256. Comments do not count.
    """
    found: dict[str, Path] = {}
    for _, node in _list_own_nodes(config):
        _add_modules(node[TARGET].rpartition(".")[0], found)
        for dotted in find_lineage(node[TARGET]) or ():
            _add_modules(dotted.rpartition(".")[0], found)
    return {module: dict(_hash_definitions(parse(path))) for module, path in found.items()}


def find_edits(config: Mapping[str, Any], run: Path) -> list[str]:
    """Return a line for each module of one's own whose definitions are others than when a run has last trained.

    Args:
        config: Resolved config.
        run: Its folder.
    """
    before = read_environment(run).get(OWN_CODE) if (run / ENVIRONMENT_FILE).is_file() else None
    lines = []
    for module, now in describe_own_code(config).items():
        then = before.get(module) if isinstance(before, dict) else None
        changed = [name for name in then if now.get(name) != then[name]] if isinstance(then, dict) else []
        if changed:
            named = ", ".join(map(str, changed[:_MOST_NAMED])) + (", …" if len(changed) > _MOST_NAMED else "")
            lines.append(f"{module} has been edited since the weights were trained, so they may compute other: {named}")
    return lines


def _list_own_nodes(config: Mapping[str, Any]) -> Iterator[tuple[str, Config]]:
    """Yield each node whose class or function is one's own, with its place in the config."""
    for section in _SECTIONS:
        yield from _walk(section, config.get(section))


def _walk(place: str, node: object) -> Iterator[tuple[str, Config]]:
    if not isinstance(node, dict):
        return
    if isinstance(target := node.get(TARGET), str) and _find_own_file(target.rpartition(".")[0]) is not None:
        yield place, node
    for name, child in node.items():
        yield from _walk(f"{place}.{name}", child)


def _find_own_file(module: str) -> Path | None:
    """Return the file of a module of one's own; None of any other, or if there is none."""
    try:
        path = module_file(module)
    except (TargetNotFoundError, OSError):
        return None
    return path if is_own(str(path)) else None


def _read_default(parameter: Parameter) -> int | float | str | None:
    """Return the default of an argument in a file of one's own; None if no config can hold it."""
    try:
        value = None if parameter.value is None else ast.literal_eval(parameter.value)
    except ValueError:  # an expression
        return None
    if not isinstance(value, int | float | str) or _find_own_file(parameter.module) is None:
        return None
    return value if _allows(parameter.annotation, value) else None


def _allows(annotation: ast.expr | None, value: float | str) -> bool:
    """Return whether an annotation, as the check reads it, admits a default: `x: tuple[int, int] = 3` runs, too."""
    match annotation:
        case None | ast.Name(id="Any"):
            return True
        case ast.Name(id=name):
            return name == type(value).__name__ or (name == "float" and type(value) is int)
        case ast.BinOp(left=left, right=right):
            return _allows(left, value) or _allows(right, value)
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
            return _allows(inner, value)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return any(isinstance(each, ast.Constant) and each.value == value for each in ast.walk(inner))
    return False


def _add_modules(module: str, found: dict[str, Path]) -> None:
    """Add a module of one's own, and those that it imports."""
    if module in found or (path := _find_own_file(module)) is None:
        return
    found[module] = path
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [import_source(node, alias.asname or alias.name, module, path) for alias in node.names]
            imported = [part for name in names for part in (name, name.rpartition(".")[0])]
        else:
            continue
        for name in imported:
            _add_modules(name, found)


def _hash_definitions(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = [
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            ]
        else:
            continue
        digest = hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:16]
        yield from ((name, digest) for name in names)
