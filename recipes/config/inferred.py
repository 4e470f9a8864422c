"""Infer what a run was started with from its frozen config, for a run folder without a record of its overrides."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.config.cached_compose import compose_options, compose_overrides
from recipes.config.overrides import make_override
from recipes.errors import ConfigError

Config = Mapping[str, Any]
_OF_A_START = ("mode", "resume", "evaluator", "hydra")
_TARGET = "_target_"
_OF_MACHINE = "oc.env"  # settings such as the folder of the cache are those of this machine


def infer_overrides(frozen: Config, typed: Sequence[str], folder: Path, name: str | None) -> list[str]:
    """Return overrides that compose to the frozen config of a run, as far as conf/ has its settings.

    A setting that refers to another one keeps referring to it, so that the schedule follows a new `trainer.max_steps`.

    Args:
        frozen: Frozen config of the run.
        typed: Overrides of the search path, without which the options may not be found.
        folder: Folder of the YAML files.
        name: Primary config, without its suffix.
    """
    overrides = [*typed]
    for group in frozen:
        if group not in _OF_A_START and (folder / group).is_dir():
            overrides += _infer_option(group, frozen[group], overrides, folder, name)
    # first what refers to nothing: most of what refers to it then has the value of the run
    for takes_references in (False, True):
        node = compose_overrides(overrides, folder, name)
        known = {key: frozen[key] for key in frozen if key in node and key not in _OF_A_START}
        overrides += _list_differences(known, node, "", takes_references=takes_references)
    return overrides[len(typed) :]


def _infer_option(group: str, section: Any, overrides: Sequence[str], folder: Path, name: str | None) -> list[str]:
    """Return the override that chooses the option of a group with the class and most of the values of a section."""
    if not isinstance(section, dict) or _TARGET not in section:
        return []
    if _get_target(compose_options(overrides, folder, name), group) == section[_TARGET]:
        return []
    equal: dict[str, int] = {}
    for file in sorted((folder / group).glob("*.yaml")):
        option = f"{group}={file.stem}"
        try:
            node = compose_options([*overrides, option], folder, name)
        except (HydraException, OmegaConfBaseException):
            continue
        if _get_target(node, group) == section[_TARGET]:
            values = OmegaConf.to_container(node[group])
            assert isinstance(values, dict), "it has a _target_"
            equal[option] = sum(section.get(key) == value for key, value in values.items())
    return [max(equal, key=lambda option: equal[option])] if equal else []


def _get_target(node: DictConfig, group: str) -> object:
    section = node.get(group)
    return section.get(_TARGET) if OmegaConf.is_dict(section) else None


def _list_differences(section: Config, node: DictConfig, path: str, *, takes_references: bool) -> Iterator[str]:
    """Yield an override for each setting that conf/ has, too, with another value."""
    if section.get(_TARGET) != node.get(_TARGET):
        return
    for key, value in section.items():
        if not str(key).isidentifier() or key not in node:
            continue
        child: Any = node._get_node(key)
        text = f"{path}{key}"
        if OmegaConf.is_dict(child) and not child._is_none() and not child._is_interpolation():
            if isinstance(value, dict):
                yield from _list_differences(value, child, f"{text}.", takes_references=takes_references)
            continue
        raw = (
            OmegaConf.to_container(child) if OmegaConf.is_list(child) and child._value() is not None else child._value()
        )
        is_reference = "${" in str(raw)
        if is_reference != takes_references or _OF_MACHINE in str(raw):
            continue
        if isinstance(value, dict) or "${" in str(value):  # not written by an override
            continue
        if (_resolve(node, text) if is_reference else raw) == value:
            continue
        try:
            yield make_override(text, value)
        except ConfigError:
            continue  # the grammar has no word for it: the setting stays as it is frozen


def _resolve(node: DictConfig, key: str) -> Any:
    try:
        value = OmegaConf.select(node, key)
    except OmegaConfBaseException:
        return None
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
