"""Does a value fit an annotation? The small part of Python's type language that config nodes use."""

import ast

_SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
_DESCRIBED = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "None": "null",
}
_LISTS = {"list", "List", "Sequence", "tuple", "Tuple", "Iterable"}
_DICTS = {"dict", "Dict", "Mapping"}


def matches_type(value: object, annotation: ast.expr) -> bool:
    """Whether a plain config value may be passed where the annotation stands; unknown annotations take anything."""
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str(source)):
            return matches_type(value, ast.parse(source, mode="eval").body)
        case ast.Name(id="bool"):
            return isinstance(value, bool)
        case ast.Name(id=name) if name in _SCALARS:
            return isinstance(value, _SCALARS[name]) and not isinstance(value, bool)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return matches_type(value, left) or matches_type(value, right)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return value is None or matches_type(value, inner)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=options)):
            return any(matches_type(value, option) for option in options)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return value in _literals(inner)
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _LISTS:
            item = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
            return isinstance(value, list) and all(matches_type(entry, item) for entry in value)
        case ast.Subscript(value=ast.Name(id=name)) if name in _DICTS:
            return isinstance(value, dict)
    return True


def describe(annotation: ast.expr) -> str:
    """An annotation in words, for the end of a message."""
    match annotation:
        case ast.Constant(value=str(source)):
            return describe(ast.parse(source, mode="eval").body)
        case ast.Constant(value=None):
            return "null"
        case ast.Name(id=name) if name in _DESCRIBED:
            return _DESCRIBED[name]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return f"{describe(left)} or {describe(right)}"
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return f"{describe(inner)} or null"
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=options)):
            return " or ".join(describe(option) for option in options)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return " or ".join(str(option) for option in _literals(inner))
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _LISTS:
            item = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
            return f"a list of {placeholder(item)}s"
    return ast.unparse(annotation)


def placeholder(annotation: ast.expr) -> str:
    """An annotation in words without articles, to stand between angle brackets."""
    return (
        describe(annotation)
        .replace("a list", "list")
        .replace("a whole", "whole")
        .replace("a n", "n")
    )


def to_setting(value: object) -> str:
    """A value as it is typed on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _literals(inner: ast.expr) -> list[object]:
    options = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    return [ast.literal_eval(option) for option in options]
