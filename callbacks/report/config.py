"""Show a run's config as escaped HTML, with command-line overrides highlighted. No Lightning."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

import yaml

from .html import folded
from .run_record import RunRecord

# config nodes that affect only the display of a run
_HIDDEN = ("dashboard", "mode", "hydra", "callbacks.report.dashboard")


def command_line_overrides(overrides: Iterable[str]) -> str:
    """Return the command-line overrides, one chip each."""
    chips = "".join(f'<code class="typed">{escape(text)}</code>' for text in overrides)
    return f'<p class="command"><code>python train.py</code>{chips}</p>' if chips else ""


def config_text(run: RunRecord) -> str:
    """Return the complete config, collapsed; the raw text if it cannot be parsed."""
    if not run.config_text:
        return ""
    if not run.config:
        return folded("Config", f"<pre>{escape(run.config_text)}</pre>", id_="config")
    lines = list(_yaml_lines(shown_config(run.config), "", "", typed_keys(run.overrides)))
    num_typed = sum(line.startswith("<mark") for line in lines)
    count = f" ({num_typed} typed {'line' if num_typed == 1 else 'lines'})" if num_typed else ""
    text = "\n".join(lines)
    return folded(f"Config{count}", f'<pre class="config">{text}</pre>', id_="config")


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


def _yaml_lines(node: dict[str, Any], prefix: str, indent: str, typed: set[str]) -> Iterator[str]:
    """Yield YAML lines, marking those whose key was overridden; for an overridden group, only the first line."""
    for name, value in node.items():
        path = f"{prefix}{name}"
        is_node = isinstance(value, dict) and value
        line = escape(f"{indent}{name}:" if is_node else f"{indent}{name}: {_scalar(value)}")
        yield f"<mark>{line}</mark>" if path in typed else line
        if is_node:
            yield from _yaml_lines(value, f"{path}.", f"{indent}  ", typed)


def _scalar(value: Any) -> str:
    """Return a value as single-line YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
