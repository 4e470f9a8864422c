"""Check numbers against the range that their annotation declares, `Annotated[int, ">= 1"]`, read from source."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.check.nodes import REPEATED
from recipes.config.check.sections import SETTINGS
from recipes.config.check.types import annotation_from, find_out_of_range, matches_type
from recipes.config.signature import TargetNotFoundError, read_signature
from recipes.errors import ConfigError

# arguments of Lightning's Trainer, which declares no ranges
_TRAINER = {
    "trainer.max_steps": "Annotated[int, '>= 1']",
    "trainer.num_nodes": "Annotated[int, '>= 1']",
    "trainer.accumulate_grad_batches": "Annotated[int, '>= 1'] | None",
    "trainer.gradient_clip_val": "Annotated[float, '> 0'] | None",
}


def check_ranges(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check every number of the config that has a declared range; values of the wrong type are skipped."""
    for key, source in SETTINGS.items():
        if key in config:
            yield from _check(key, config[key], source)
    for key, source in _TRAINER.items():
        section, _, name = key.partition(".")
        if isinstance(config.get(section), Mapping) and name in config[section]:
            yield from _check(key, config[section][name], source)
    yield from _check_nodes(config, "")


def _check_nodes(config: Mapping[str, Any], path: str) -> Iterator[ConfigError]:
    for key, node in config.items():
        if not isinstance(node, Mapping):
            continue
        here = f"{path}.{key}" if path else str(key)
        if here in REPEATED:
            continue
        if isinstance(node.get("_target_"), str):
            yield from _check_node(here, node)
        yield from _check_nodes(node, here)


def _check_node(path: str, node: Mapping[str, Any]) -> Iterator[ConfigError]:
    try:
        parameters = read_signature(node["_target_"]).parameters
    except TargetNotFoundError:  # an error of its own, found by the check of nodes
        return
    for name, value in node.items():
        annotation = parameters[name].annotation if name in parameters else None
        if annotation is not None and matches_type(value, annotation):
            yield from _out_of_range(f"{path}.{name}", find_out_of_range(value, annotation))


def _check(key: str, value: object, source: str) -> Iterator[ConfigError]:
    annotation = annotation_from(source)
    if matches_type(value, annotation):
        yield from _out_of_range(key, find_out_of_range(value, annotation))


def _out_of_range(key: str, found: tuple[str, object, str] | None) -> Iterator[ConfigError]:
    if found is not None:
        index, number, bounds = found
        fix = f"'{key}=[…]', each {bounds}" if index else f"{key}=<{bounds}>"
        yield ConfigError(f"{key}{index}={number}", f"it must be {bounds}", fix)
