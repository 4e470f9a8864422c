"""Check the rules on names of parameters: their settings and regular expressions. Names are known once it is built."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from recipes.config.check.types import annotation_from, describe, find_out_of_range, matches_type, to_setting
from recipes.config.instantiate import TARGET
from recipes.config.signature import TargetNotFoundError, read_signature
from recipes.errors import ConfigError, type_setting

_GROUPS = "optimizer.groups"
_ENTRY = {
    "match": "str",
    "lr_scale": "Annotated[float, '> 0'] | None",
    "weight_decay": "Annotated[float, '>= 0'] | None",
    "freeze": "bool | None",
}
_EXAMPLE = '{match: "^head", lr_scale: 10}'


def check_parameter_rules(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check `freeze`, `optimizer.groups` and the type of `optimizer.layer_decay`."""
    freeze, optimizer = config.get("freeze"), config.get("optimizer")
    for match in freeze if isinstance(freeze, list) else ():
        if isinstance(match, str) and (wrong := _find_wrong_expression(match)):
            yield ConfigError(f"freeze=[{match}]", wrong, type_setting("freeze", [re.escape(match)]))
    if not isinstance(optimizer, Mapping):
        return
    decay, decay_type = optimizer.get("layer_decay"), annotation_from("float | None")
    if not matches_type(decay, decay_type):
        typed = f"optimizer.layer_decay={to_setting(decay)}"
        yield ConfigError(typed, f"it takes {describe(decay_type)}", "optimizer.layer_decay=0.75")
    groups = optimizer.get("groups", [])
    if not isinstance(groups, list):
        meant = [groups] if isinstance(groups, dict) and "match" in groups else []
        fix = type_setting(_GROUPS, meant) if meant else f"'{_GROUPS}=[{_EXAMPLE}]'"
        yield ConfigError(f"{_GROUPS}={to_setting(groups)}", "it takes a list of sections, each with match", fix)
        return
    for index in range(len(groups)):
        yield from _check_entry(groups, index, optimizer)


def _check_entry(groups: list[Any], index: int, optimizer: Mapping[str, Any]) -> Iterator[ConfigError]:
    entry = groups[index]
    typed = f"{_GROUPS}=[{'…,' * bool(index)}{to_setting(entry)}{',…' * (index + 1 < len(groups))}]"

    def instead(entry: Mapping[str, Any]) -> str:
        return type_setting(_GROUPS, [*groups[:index], entry, *groups[index + 1 :]])

    if not isinstance(entry, dict):
        meant = {"match": entry, "freeze": True}
        fix = instead(meant) if isinstance(entry, str) else f"'{_GROUPS}=[{_EXAMPLE}]'"
        yield ConfigError(typed, f"an entry is a section such as {_EXAMPLE}", fix)
        return
    for key, value in entry.items():
        if key not in _ENTRY:
            near = get_close_matches(str(key), _ENTRY, 1)
            kept = {name: own for name, own in entry.items() if name != key}
            meant = {near[0]: value} | kept if near else {"lr_scale": _example_of("lr_scale")} | kept
            yield ConfigError(typed, f"an entry has {', '.join(_ENTRY)}, and no {key}", instead(meant))
            return
        annotation = annotation_from(_ENTRY[key])
        if not matches_type(value, annotation):
            yield ConfigError(typed, f"{key} takes {describe(annotation)}", instead(entry | {key: _example_of(key)}))
            return
        if (found := find_out_of_range(value, annotation)) is not None:
            yield ConfigError(typed, f"{key} must be {found[2]}", instead(entry | {key: _example_of(key)}))
            return
    settings = {key: value for key, value in entry.items() if key != "match" and value is not None}
    if "match" not in entry:
        reason = "an entry names its parameters with match, a regular expression"
        yield ConfigError(typed, reason, instead({"match": "^head"} | entry))
    elif wrong := _find_wrong_expression(entry["match"]):
        yield ConfigError(typed, wrong, instead(entry | {"match": re.escape(entry["match"])}))
    elif not settings:
        reason = "it says nothing of what it matches: lr_scale, weight_decay or freeze"
        yield ConfigError(typed, reason, instead(entry | {"freeze": True}))
    elif settings.get("freeze") and len(settings) > 1:
        reason = "frozen parameters have neither a learning rate nor a decay"
        yield ConfigError(typed, reason, instead({"match": entry["match"], "freeze": True}))
    elif "weight_decay" in settings and not _has_weight_decay(optimizer):
        reason = f"{str(optimizer[TARGET]).rpartition('.')[2]} has no weight decay"
        kept = {key: value for key, value in entry.items() if key != "weight_decay"}
        fix = instead(kept) if len(settings) > 1 else "optimizer.groups=[]"
        yield ConfigError(typed, reason, f"{fix}, or optimizer=adamw")


def _find_wrong_expression(match: str) -> str | None:
    """Return why a text is no regular expression; None if it is one."""
    try:
        re.compile(match)
    except re.error as error:
        return f"{match!r} is no regular expression: {error}"
    return None


def _example_of(key: str) -> object:
    return {"match": "^head", "lr_scale": 0.1, "weight_decay": 0.0, "freeze": True}[key]


def _has_weight_decay(optimizer: Mapping[str, Any]) -> bool:
    try:
        signature = read_signature(str(optimizer.get(TARGET)))
    except TargetNotFoundError:
        return True  # the check of nodes reports it
    return signature.takes_any or "weight_decay" in signature.parameters
