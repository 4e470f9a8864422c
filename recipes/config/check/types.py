"""Match config values with annotations: the subset of Python's type syntax that config nodes use.

A range is part of the annotation, `Annotated[int, ">= 1"]` or `Annotated[float, "> 0, < 1"]`, and read from source.
"""

import ast
import operator

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


def annotation_from(source: str) -> ast.expr:
    """Parse an annotation."""
    return ast.parse(source, mode="eval").body


def matches_type(value: object, annotation: ast.expr) -> bool:
    """Return whether a plain config value matches an annotation; an unknown annotation matches everything."""
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str(source)):
            return matches_type(value, annotation_from(source))
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
            return matches_type(value, inner)
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
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)) if not _is_open(items):
            return isinstance(value, list) and len(value) == len(items) and all(map(matches_type, value, items))
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _LISTS:
            item = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
            return isinstance(value, list) and all(matches_type(entry, item) for entry in value)
        case ast.Subscript(value=ast.Name(id=name)) if name in _DICTS:
            return isinstance(value, dict)
    return True


def find_out_of_range(value: object, annotation: ast.expr) -> tuple[str, object, str] | None:
    """Find the first number outside the range that its annotation declares.

    Returns:
        Its index in a list as text, empty for a single number; the number; and its range in English. None if all
        are inside.
    """
    match annotation:
        case ast.Constant(value=str(source)):
            return find_out_of_range(value, annotation_from(source))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return find_out_of_range(value, left) or find_out_of_range(value, right)
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[_, ast.Constant(value=str(text))])):
            if isinstance(value, bool) or not isinstance(value, int | float):
                return None
            return None if _is_inside(value, text) else ("", value, describe_range(text))
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _LISTS:
            item = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
            for index, entry in enumerate(value if isinstance(value, list) else ()):
                if found := find_out_of_range(entry, item):
                    return f"[{index}]", *found[1:]
    return None


def describe_range(text: str) -> str:
    """Describe a declared range: `> 0, < 1` is "above 0 and below 1"."""
    lowest, *highest = text.split(", ")
    sign, number = lowest.split(" ", 1)
    if highest == ["< inf"]:
        return f"finite and {describe_range(lowest)}"
    if not highest:
        return f"at least {number}" if sign == ">=" else f"above {number}"
    other, bound = highest[0].split(" ", 1)
    if (sign, other) == (">=", "<="):
        return f"from {number} to {bound}"
    return f"{'at least' if sign == '>=' else 'above'} {number} and {'at most' if other == '<=' else 'below'} {bound}"


def _is_inside(value: float, text: str) -> bool:
    compare = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
    bounds = (bound.split(" ", 1) for bound in text.split(", "))
    return all(compare[sign](value, float(number)) for sign, number in bounds)


def describe(annotation: ast.expr) -> str:
    """Describe an annotation, for the end of a message."""
    match annotation:
        case ast.Constant(value=str(source)):
            return describe(annotation_from(source))
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
            return describe(inner)
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
            items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            count = "" if name != "tuple" or _is_open(items) else f"{len(items)} "
            return f"a list of {count}{placeholder(items[0])}s"
    return ast.unparse(annotation)


def placeholder(annotation: ast.expr) -> str:
    """Describe an annotation without articles, to stand between angle brackets."""
    return describe(annotation).replace("a list", "list").replace("a whole", "whole").replace("a n", "n")


def _is_open(items: list[ast.expr]) -> bool:
    """Return whether the annotation of a tuple allows any length: `tuple[int, ...]`."""
    return isinstance(items[-1], ast.Constant) and items[-1].value is Ellipsis


def to_setting(value: object) -> str:
    """Return a value as it is typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(to_setting, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{to_setting(child)}' for key, child in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _literals(inner: ast.expr) -> list[object]:
    options = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    return [ast.literal_eval(option) for option in options]
