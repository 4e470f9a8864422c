"""Match config values with annotations, in the vocabulary that `read_annotation` of signature.py reduces them to.

A range is part of the annotation, `Annotated[int, ">= 1"]` or `Annotated[float, "> 0, < 1"]`, and read from source.
"""

import ast
import contextlib
import math
import operator
import re
import unicodedata
from difflib import get_close_matches

from hydra.errors import HydraException

from recipes.config.overrides import TYPOGRAPHIC_QUOTES, for_shell, parse_override, to_grammar

_SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
_DESCRIBED = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "Any": "any value",
    "Callable": "a section with a _target_ and _partial_: true",
}
_OBJECT = "a section with a _target_"
_PLURALS = {"int": "whole numbers", "float": "numbers", "str": "texts", "bool": "true or false"}
_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
# of float32, in which most arithmetic of a run happens: what is larger becomes inf, what is smaller becomes 0
_LARGEST, _SMALLEST = 2.0**128, 2.0**-149
_INT64 = 2**63
_OF_A_SWEEP = re.compile(r"(tag|interval|choice|range|shuffle|sort)\(")
_SWITCHES = {"yes": "true", "on": "true", "y": "true", "1": "true", "no": "false", "off": "false", "n": "false"}
_SWITCHES |= {"0": "false"}


def annotation_from(source: str) -> ast.expr:
    """Parse an annotation."""
    return ast.parse(source, mode="eval").body


def matches_type(value: object, annotation: ast.expr) -> bool:
    """Return whether a plain config value matches an annotation; a section with a `_target_` may become any object."""
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
            return matches_type(value, inner)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return any(value == option and type(value) is type(option) for option in _literals(inner))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return matches_type(value, left) or matches_type(value, right)
        case ast.Name(id="Any"):
            return True
        case ast.Name(id="bool"):
            return isinstance(value, bool)
        case ast.Name(id=name) if name in _SCALARS:
            return isinstance(value, _SCALARS[name]) and not isinstance(value, bool)
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)) if not _is_open(items):
            return isinstance(value, list) and len(value) == len(items) and all(map(matches_type, value, items))
        case ast.Subscript(value=ast.Name(id="list" | "tuple"), slice=inner):
            return isinstance(value, list) and all(matches_type(entry, _item(inner)) for entry in value)
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, child])):
            return isinstance(value, dict) and all(matches_type(entry, child) for entry in value.values())
        case ast.Name() | ast.Attribute():  # a function or an object; the option `none` is an empty section
            return isinstance(value, dict) and ("_target_" in value or not value)
    raise _unknown(annotation)


def takes_any_key(annotation: ast.expr) -> bool:
    """Return whether an argument is a section with keys of any name, such as `launcher.directives`."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return takes_any_key(left) or takes_any_key(right)
        case ast.Name(id="Any") | ast.Subscript(value=ast.Name(id="dict")):
            return True
    return False


def find_out_of_range(value: object, annotation: ast.expr) -> tuple[str, object, str] | None:
    """Find the first number outside the range that its annotation declares.

    Returns:
        Its place in a list or section as text, empty for a single number; the number; and its range in English. None
        if all are inside.
    """
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return find_out_of_range(value, left) or find_out_of_range(value, right)
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, bounds])):
            text = str(ast.literal_eval(bounds))
            if isinstance(value, list):  # the range of a list is that of its length
                allowed = _find_bounds(len(value), text, is_integer=True)
                return ("", to_setting(value), f"a list of {allowed}") if allowed else find_out_of_range(value, inner)
            if isinstance(value, int | float) and not isinstance(value, bool):
                allowed = _find_bounds(value, text, is_integer=ast.unparse(inner) == "int")
                return None if allowed is None else ("", value, allowed)
        case ast.Subscript(value=ast.Name(id="list" | "tuple"), slice=inner) if isinstance(value, list):
            is_fixed = isinstance(inner, ast.Tuple) and not _is_open(inner.elts)
            items = inner.elts if is_fixed and isinstance(inner, ast.Tuple) else [_item(inner)] * len(value)
            return _find_first([(f"[{index}]", entry, item) for index, (entry, item) in enumerate(zip(value, items))])  # noqa: B905  a tuple of another length does not match
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, child])) if isinstance(value, dict):
            return _find_first([(f".{key}", entry, child) for key, entry in value.items()])
    return None


def _find_first(entries: list[tuple[str, object, ast.expr]]) -> tuple[str, object, str] | None:
    for place, entry, annotation in entries:
        if found := find_out_of_range(entry, annotation):
            return f"{place}{found[0]}", *found[1:]
    return None


def _find_bounds(value: float, text: str, *, is_integer: bool) -> str | None:
    """Return in English what a number must be; None if it is inside of its range.

    Without an end at inf a range has only numbers that float32 can hold, or int64 where it is of whole numbers.
    """
    allowed = describe_range(text)
    is_inside = all(_COMPARE[sign](value, float(number)) for sign, number in _split(text))
    if "inf" not in text and not is_integer and not math.isfinite(value):
        return f"finite and {allowed}"
    if not is_inside:
        return allowed
    if is_integer:
        return None if -_INT64 <= value < _INT64 else f"{allowed} and below 2^63"
    if "inf" in text or value == 0 or _SMALLEST <= abs(value) < _LARGEST:
        return None
    return f"{allowed} in float32" if abs(value) < 1 else f"finite in float32 and {allowed}"


def describe_range(text: str) -> str:
    """Describe a declared range: `> 0, < 1` is "above 0 and below 1"."""
    words = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}
    bounds = [(sign, number) for sign, number in _split(text) if number != "inf"]
    if [sign for sign, _ in bounds] == [">=", "<="]:
        return f"from {bounds[0][1]} to {bounds[1][1]}"
    return " and ".join(f"{words[sign]} {number}" for sign, number in bounds) or "a finite number"


def _split(text: str) -> list[tuple[str, str]]:
    return [(sign, number) for sign, _, number in (bound.partition(" ") for bound in text.split(", "))]


def describe(annotation: ast.expr) -> str:
    """Describe an annotation, for the end of a message."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
            return describe(inner)
        case ast.Constant(value=None):
            return "null"
        case ast.Name(id=name) if name in _DESCRIBED:
            return _DESCRIBED[name]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return f"{describe(left)} or {describe(right)}"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return " or ".join(str(option) for option in _literals(inner))
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)) if not _is_open(items):
            return f"a list of {len(items)} {_describe_several(items[0])}"
        case ast.Subscript(value=ast.Name(id="list" | "tuple"), slice=inner):
            several = _describe_several(_item(inner))
            return f"a list of {several}" if several else "a list"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, child])):
            return f"a section such as {{name: {placeholder(child)}}}"
        case ast.Name() | ast.Attribute():
            return _OBJECT
    raise _unknown(annotation)


def placeholder(annotation: ast.expr) -> str:
    """Describe an annotation without articles, to stand between angle brackets."""
    text = describe(annotation)
    for article, short in (
        ("a section such as ", ""),
        ("a section", "section"),
        ("a list", "list"),
        ("a whole", "whole"),
        ("a n", "n"),
        ("any value", "value"),
    ):
        text = text.replace(article, short)
    return text


def suggest(key: str, value: object, annotation: ast.expr) -> str:
    """Return the override with the value that a wrong one is meant to be, else with its type between brackets."""
    if (meant := _find_meant(value, annotation)) is not None:
        override = f"{key}={meant}"
        return f'"{override}"' if "'" in meant and not set(meant) & set('"$`\\!') else for_shell(override)
    if isinstance(value, str) and _OF_A_SWEEP.match(value):
        span = "range(<low>,<high>)" if matches_type(1, annotation) and not matches_type(1.5, annotation) else None
        space = span or "tag(log,interval(<low>,<high>))"
        return f"-m hydra/sweeper=optuna '{key}={space}', or -m {key}=<values with commas>"
    if matches_type([value], annotation):  # tags=mine
        return f"'{key}=[{to_setting(value)}]'" if " " in to_setting(value) else f"{key}=[{to_setting(value)}]"
    for number in _read_numbers(value):
        if matches_type(number, annotation):
            return f"{key}={number}"
    if describe(annotation).startswith(_DESCRIBED["Callable"]):
        return f"'{key}={{_target_: <module.function>, _partial_: true}}'"
    return f"{key}=<{placeholder(annotation)}>"


def _find_meant(value: object, annotation: ast.expr) -> str | None:
    """Return the value that a wrong one is meant to be: a list with both brackets, the name that it abbreviates."""
    switch = _SWITCHES.get(to_setting(value).casefold())
    if switch is not None and matches_type(True, annotation):
        return switch
    if value is None and matches_type([], annotation):
        return "[]"
    if isinstance(value, list) and value and matches_type(texts := [to_setting(entry) for entry in value], annotation):
        return to_grammar(texts)
    if not isinstance(value, str):
        return None
    bare = value.strip(TYPOGRAPHIC_QUOTES)
    candidates = [bare] if bare != value else []
    if value.startswith("[") != value.endswith("]"):
        candidates.append(f"[{value.strip('[]')}]")
    elif value.startswith("(") and value.endswith(")"):
        candidates.append(f"[{value[1:-1]}]")
    for text in candidates:
        with contextlib.suppress(HydraException):
            meant = parse_override(f"x={text}").value()
            if matches_type(meant, annotation) or (matches_type(text, annotation) and not text.startswith("[")):
                return text
    named = [str(name) for name in _list_names(annotation)]
    folded = value.casefold().replace("_", "-")
    near = [name for name in named if name.casefold().replace("_", "-").startswith(folded) and folded]
    return near[0] if len(near) == 1 else next(iter(get_close_matches(value, named, 1)), None)


def _list_names(annotation: ast.expr) -> list[str]:
    """Return the texts that an annotation allows: those of a `Literal`."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return [*_list_names(left), *_list_names(right)]
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return [name for name in _literals(inner) if isinstance(name, str)]
    return []


def _read_numbers(value: object) -> list[object]:
    """Return what a value may mean as a number: 1e3 is 1000, 0x10 is 16, a minus of Unicode is that of ASCII."""
    if isinstance(value, float) and value.is_integer():
        return [int(value)]
    if not isinstance(value, str):
        return []
    text = unicodedata.normalize("NFKC", value).translate({ord("−"): "-", ord("–"): "-"}).strip()  # noqa: RUF001
    numbers: list[object] = []
    for read in (lambda: int(text, 0), lambda: float(text)):
        with contextlib.suppress(ValueError):
            numbers.append(read())
    return numbers


def _describe_several(annotation: ast.expr) -> str:
    """Describe the entries of a list; empty if they may be anything."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
            return _describe_several(inner)
        case ast.Name(id="Any"):
            return ""
        case ast.Name(id=name) if name in _PLURALS:
            return _PLURALS[name]
        case ast.Subscript(value=ast.Name(id="dict")):
            return "sections"
        case ast.Subscript(value=ast.Name(id="list" | "tuple")):
            return "lists"
    return placeholder(annotation)


def _item(inner: ast.expr) -> ast.expr:
    """Return the annotation of the entries of a list, or of a tuple of any length."""
    return inner.elts[0] if isinstance(inner, ast.Tuple) else inner


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


def _unknown(annotation: ast.expr) -> AssertionError:
    """Return an error of the check itself: what it does not know it would accept with any value."""
    return AssertionError(f"the config check does not know the annotation {ast.unparse(annotation)}")
