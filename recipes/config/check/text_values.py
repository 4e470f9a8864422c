"""Quote values of text settings that Hydra's grammar would read as a number, a list or a sweep."""

import ast
import os
import re
from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from recipes.config.check.sections import SETTINGS
from recipes.config.check.types import annotation_from, matches_type
from recipes.config.overrides import for_shell, is_about_sweep, parse_override, quote
from recipes.config.signature import find_signature
from recipes.errors import ConfigError, type_command

_NUMBERS = re.compile(r"-?[\d.]+(,-?[\d.]+)+")  # 0,1 of trainer.devices
_TWO_NUMBERS = re.compile(r"-?\d+,\d+")
_DECIMAL_COMMA = re.compile(r"-?\d+,0\d*")  # 0,001


def find_annotation(config: Any, key: str) -> ast.expr | None:
    """Return the declared type of a setting; None if it has none.

    Args:
        config: Composed config, plain or as nodes.
        key: Dotted key.
    """
    if key in SETTINGS:
        return annotation_from(SETTINGS[key])
    *sections, name = key.split(".")
    node = config
    for section in sections:
        node = _get(node, section)
    parameters = find_signature(_get(node, "_target_")).parameters
    return parameters[name].annotation if name in parameters else None


def quote_text(override: str, config: Any, typed: str | None = None) -> str:
    """Quote the value of an override if the setting takes text and Hydra would read something else.

    Args:
        override: As typed; one that cannot be parsed is returned as it is.
        config: Composed config.
        typed: What was typed, of which `override` quotes a part for Hydra's grammar.
    """
    try:
        parsed = parse_override(override)
    except HydraException:
        return override
    value = None if parsed.is_delete() or parsed.is_sweep_override() else parsed.value()
    if value is None or isinstance(value, str):
        return override
    annotation = find_annotation(config, parsed.key_or_group)
    text = (typed or override).partition("=")[2]
    is_text = annotation is not None and matches_type(text, annotation) and not matches_type(value, annotation)
    return f"{override.partition('=')[0]}={quote(text)}" if is_text else override


_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "resume")


def answer_sweep(typed: str, override: Override, config: Any) -> str | ConfigError:
    """Handle a value with commas in a single run: quote it if it is text, else return the error.

    Args:
        typed: The override as text.
        override: The override as parsed, a sweep.
        config: The config without values.
    """
    key, _, value = typed.partition("=")
    annotation = find_annotation(config, override.key_or_group)
    sweeper = "hydra/sweeper=optuna " if "interval(" in value else ""  # a grid needs single values
    sweep = type_command(f"-m {sweeper}{for_shell(typed)}")
    if override.key_or_group in _FOLDERS or is_about_sweep(key):  # of the run, not a value that jobs could differ in
        return ConfigError(typed, "a comma separates the values of a sweep", f'"{key}={quote(value)}"')
    if annotation is not None and _NUMBERS.fullmatch(value) and _is_list(value, annotation):
        return ConfigError(typed, "it takes a list", f"'{key}=[{value}]'")
    if annotation is not None and matches_type(value, annotation):
        # prose has a space after a comma; sweep values do not
        if ", " in value or os.path.exists(os.path.expanduser(value)):
            return f"{key}={quote(value)}"
        return ConfigError(typed, "a single run takes one value", f'"{key}={quote(value)}" for one text, or {sweep}')
    if annotation is not None and (matches_type(value.split(","), annotation) or _is_list(value, annotation)):
        return ConfigError(typed, "it takes a list", f"'{key}=[{value}]'")
    point = decimal_point(typed)
    if point == typed and _TWO_NUMBERS.fullmatch(value) and annotation is not None and matches_type(0.5, annotation):
        point = f"{key}={value.replace(',', '.')}"  # 2,50
    if re.fullmatch(r"-?\d+,0\d+", value):  # nobody writes a number 001
        return ConfigError(typed, "a comma separates the values of a sweep", point)
    return ConfigError(typed, "a single run takes one value", sweep if point == typed else f"{point}, or {sweep}")


def decimal_point(typed: str) -> str:
    """Replace a decimal comma with a point, `lr=0,001`; return any other override unchanged."""
    key, equals, value = typed.partition("=")
    return f"{key}={value.replace(',', '.')}" if equals and _DECIMAL_COMMA.fullmatch(value) else typed


def _is_list(value: str, annotation: ast.expr) -> bool:
    try:
        return matches_type(parse_override(f"x=[{value}]").value(), annotation)
    except HydraException:
        return False


def _get(node: Any, key: str) -> Any:
    """Return the child of a section without resolving interpolations; None if there is none."""
    if hasattr(node, "_get_node"):
        child = node._get_node(key, validate_access=False) if hasattr(node, "keys") else None
        return child._value() if child is not None and not hasattr(child, "keys") else child
    return node.get(key) if isinstance(node, Mapping) else None
