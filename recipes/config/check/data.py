"""Check the data sources of a mixture and of additional validations: their names and contents."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.check.types import to_setting
from recipes.config.signature import find_signature
from recipes.config.traits import DATA_GROUPS, list_data, read_sample_kind, select
from recipes.errors import ConfigError, type_setting

_NAME = re.compile(r"(?!_.*_$)[\w-]+")  # Hydra reads names such as _target_ itself

_NESTED = "a mixture cannot hold a mixture: its sources are other options of data"


def check_data(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check images against the model, and every named data source: its name, part of a metric, and its kind of data."""
    yield from _check_images(config)
    kinds = {section: read_sample_kind(node) for section, node in list_data(config)}
    for group in DATA_GROUPS:
        members = select(config, group)
        for name, node in members.items() if isinstance(members, Mapping) else ():
            where = f"{group}.{name}"
            if not _NAME.fullmatch(str(name)):
                reason = "its name is part of its metric names: letters, digits, - and _, but not _ at both ends"
                yield ConfigError(f"{where}=…", reason, f"+data@{group}.<name>=<option of data>")
            elif (below := _find_source(node)) is not None:
                yield reject_dots(f"{where}.{below}", _get_option(node[below]))
            elif group == "data.sources" and where in kinds and "sources" in node:
                yield ConfigError(f"{where}=…", _NESTED, f"+data@{where}=<another option of data>")
            elif where not in kinds and not (node is None and group == "eval_data"):
                reason = "it must be a data source: a section with a _target_"
                yield ConfigError(f"{where}={to_setting(node)}", reason, f"+data@{where}=<option of data>")
            elif where in kinds and kinds[where] is None and not find_signature(node["_target_"]).takes_any:
                reason = f"{node['_target_']} is no data source: it has no sample_kind"
                yield ConfigError(f"{where}=…", reason, f"+data@{where}=<option of data> instead")
            elif where in kinds and None not in (kinds[where], kinds["data"]) and kinds[where] != kinds["data"]:
                reason = f"it gives {kinds[where]}, and data= gives {kinds['data']}"
                yield ConfigError(f"{where}=…", reason, f"another option: +data@{where}=<option of data>")
    yield from _check_tokenizers(config)
    sources, further = (select(config, group) for group in DATA_GROUPS)
    for name in {*_names(sources)} & {*_names(further)}:
        reason = f"the mixture has a source of this name, and both would be val/{name}/loss"
        same: Any = select(config, f"eval_data.{name}")
        path = f" eval_data.<another name>{type_setting('.path', same['path'])}" if same.get("path") else ""
        fix = f"+data@eval_data.<another name>={_get_option(same)}{path}"
        yield ConfigError(f"eval_data.{name}=…", reason, fix)


def reject_dots(place: str, option: str) -> ConfigError:
    """Return the error for an option of data at a place below those of data sources.

    Args:
        place: `data.sources.code.py`, or `data.sources.m.sources.b` within another mixture.
        option: The option.
    """
    group = next(group for group in DATA_GROUPS if place.startswith(f"{group}."))
    name = place.removeprefix(f"{group}.")
    if ".sources." in name:
        outer, _, inner = name.partition(".sources.")
        fix = f"+data@{group}.{inner}={option} in place of {outer}, with its weight in data.weights"
        return ConfigError(f"+data@{place}={option}", _NESTED, fix)
    reason = "its name is part of its metric names, and has no dots: letters, digits, - and _"
    return ConfigError(f"+data@{place}={option}", reason, f"+data@{group}.{name.replace('.', '_')}={option}")


def _find_source(node: object) -> str | None:
    """Return the name of a data source in a section that is none itself."""
    if not isinstance(node, Mapping) or "_target_" in node:
        return None
    return next((str(name) for name, one in node.items() if isinstance(one, Mapping) and "_target_" in one), None)


def _get_option(node: Mapping[str, Any]) -> str:
    parts = str(node["_target_"]).split(".")
    return parts[2] if parts[:2] == ["recipes", "data"] else "<option of data>"


def _check_tokenizers(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check that no source has its own tokenizer: all use the tokenizer of the first."""
    typed = [(section, node["tokenizer"]) for section, node in list_data(config) if "tokenizer" in node]
    for section, tokenizer in typed[1:]:
        if tokenizer != typed[0][1]:
            setting = f"{section}.tokenizer={to_setting(tokenizer)}"
            reason = f"one model reads all data, with the tokens of {typed[0][0]}"
            yield ConfigError(setting, reason, "tokenizer=<one for all sources>")


def _names(members: object) -> list[str]:
    return [str(name) for name in members] if isinstance(members, Mapping) else []


def _check_images(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Reject images with other channels or more classes than the model has, where both are known."""
    takes, gives = select(config, "model.in_channels"), select(config, "data.in_channels")
    constants = find_signature(select(config, "data._target_")).constants
    gives = constants.get("num_channels") if gives is None else gives
    if isinstance(takes, int) and isinstance(gives, int) and takes != gives:
        reason = f"the number of channels of the images of data= is {gives}"
        yield ConfigError(f"model.in_channels={takes}", reason, f"model.in_channels={gives}, or another data=")
    classes, given = select(config, "model.num_classes"), select(config, "data.num_classes")
    if isinstance(classes, int) and isinstance(given, int) and given > classes:
        reason = f"the model has model.num_classes={classes}"
        yield ConfigError(f"data.num_classes={given}", reason, f"model.num_classes={given}")
    known = find_signature(select(config, "data._target_")).constants.get("num_classes")
    if isinstance(classes, int) and isinstance(known, int) and known > classes:
        reason = f"the images of data= have {known} classes"
        yield ConfigError(f"model.num_classes={classes}", reason, f"model.num_classes={known}, or another data=")
