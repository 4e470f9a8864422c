"""Show a run's config, with the lines that overrides have set. No Lightning."""

from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from .run_record import RunRecord

# config nodes that affect only the display of a run
_HIDDEN = ("dashboard", "mode", "hydra", "callbacks.report.dashboard")


def config_lines(run: RunRecord) -> list[tuple[str, bool]]:
    """Return the lines of the config and whether an override has set them; the raw text if it cannot be parsed."""
    if not run.config:
        return [(line, False) for line in run.config_text.split("\n") if run.config_text]
    return list(_yaml_lines(shown_config(run.config), "", "", typed_keys(run.overrides)))


def typed_keys(overrides: Sequence[str]) -> set[str]:
    """Return the config keys set by overrides.

    `+a.b=c` sets `a.b`, `group@package=option` sets `group`; a deletion sets nothing.
    """
    keys = {text.lstrip("+").partition("=")[0] for text in overrides if not text.startswith("~")}
    return {key.partition("@")[0].replace("/", ".") for key in keys}


def shown_config(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a config without the nodes that affect only the display of the run."""
    shown: dict[str, Any] = {}
    for name, value in config.items():
        if f"{prefix}{name}" not in _HIDDEN:
            is_node = isinstance(value, dict)
            shown[str(name)] = shown_config(value, f"{prefix}{name}.") if is_node else value
    return shown


def _yaml_lines(node: dict[str, Any], prefix: str, indent: str, typed: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield YAML lines and whether their key was overridden; for an overridden group, only the first line."""
    for name, value in node.items():
        path = f"{prefix}{name}"
        is_node = isinstance(value, dict) and value
        yield f"{indent}{name}:" if is_node else f"{indent}{name}: {_scalar(value)}", path in typed
        if is_node:
            yield from _yaml_lines(value, f"{path}.", f"{indent}  ", typed)


def _scalar(value: Any) -> str:
    """Return a value as single-line YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
