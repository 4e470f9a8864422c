"""Check the sections and panels of a dashboard: a page is written at the end of a run, too late to find a mistake."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recipes.config.traits import select
from recipes.errors import ConfigError

KINDS = ("line", "bar", "parallel")
DEFAULTS: dict[str, Any] = {"kind": "line", "log_scale": False}
# the first names them; the others refer to it unless they are typed
PLACES = ("dashboard.sections", "callbacks.report.dashboard", "mode.dashboard", "mode.sections", "sweep.dashboard")
_SECTION_KEYS = {"title": str, "panels": list, "adds_own": bool}
_PANEL_KEYS = {
    "title": str,
    "metrics": list,
    "kind": str,
    "log_scale": bool,
    "picture": bool,  # used for curves.png only
    "parameters": list,
    "unless": str,
}


def check_dashboards(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check every list of sections in a config, each once.

    Args:
        config: Plain values, every interpolation resolved.
    """
    checked: list[object] = []
    for place in PLACES:
        sections = select(config, place)
        # a report without sections draws every metric; the others need a list, if only an empty one
        is_missing = sections is None and (place != PLACES[0] or not isinstance(config.get("dashboard"), dict))
        if is_missing or sections in checked:
            continue
        checked.append(sections)
        try:
            check_sections(place, sections)
        except ConfigError as mistake:
            yield mistake


def check_sections(place: str, sections: object) -> None:
    """Check the sections of one dashboard.

    Args:
        place: Their key.
        sections: As in conf/dashboard/.

    Raises:
        ConfigError: A section or a panel is invalid.
    """
    if not isinstance(sections, Sequence) or isinstance(sections, str):
        example = f"'{place}=[{{title: <text>, panels: [{{title: <text>, metrics: [<name>]}}]}}]'"
        shown = "null" if sections is None else sections
        raise ConfigError(f"{place}={shown}", "it takes a list of sections", example)
    for number, section in enumerate(sections):
        where = f"{place}[{number}]"
        _check_keys(where, section, _SECTION_KEYS, required=("title", "panels"))
        for index, panel in enumerate(section["panels"]):
            _check_panel(f"{where}.panels[{index}]", panel)


def _check_panel(where: str, panel: object) -> None:
    _check_keys(where, panel, _PANEL_KEYS, required=("title", "metrics"))
    assert isinstance(panel, dict)
    for key in ("metrics", "parameters"):
        names = panel[key] if key in panel else ["-"]
        if not names or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{where}.{key}={names}", "it needs a list of names", f"{key}: [<name>, …]")
    kind = (DEFAULTS | panel)["kind"]
    if kind not in KINDS:
        raise ConfigError(f"{where}.kind={kind}", f"the kinds are {', '.join(KINDS)}", "kind: <one of them>")
    if kind != "parallel" and "parameters" in panel:
        raise ConfigError(f"{where}.kind={kind}", f"a {kind} panel has no parameters", "kind: parallel")


def _check_keys(where: str, node: object, types: Mapping[str, type], *, required: tuple[str, ...]) -> None:
    if not isinstance(node, dict):
        raise ConfigError(f"{where}={node}", f"it needs {', '.join(types)}", f"{{{required[0]}: …, …}}")
    for key, value in node.items():
        if key not in types:
            raise ConfigError(f"{where}.{key}={value}", f"there is no key {key!r}", f"one of {', '.join(types)}")
        if not isinstance(value, types[key]):
            expected = {str: "text", list: "a list", bool: "true or false"}[types[key]]
            raise ConfigError(f"{where}.{key}={value}", f"it must be {expected}", f"{key}: <{expected}>")
    for key in required:
        if key not in node:
            raise ConfigError(f"no {where}.{key}", f"it needs {' and '.join(required)}", f"{key}: …")
