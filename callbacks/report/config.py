"""A run's config as text, what was typed highlighted in it: escaped HTML. No Lightning."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import yaml

from .html import folded
from .run_record import RunRecord

# How the run is shown and what else the command line can do: no part of what was trained.
LEFT_OUT = ("dashboard", "mode", "hydra", "callbacks.report.dashboard")


def typed_words(run: RunRecord) -> str:
    """What was typed, word by word."""
    chips = "".join(f'<code class="typed">{escape(word)}</code>' for word in run.overrides)
    return f'<p class="words"><code>python train.py</code>{chips}</p>' if chips else ""


def config_text(run: RunRecord) -> str:
    """The whole config, folded; as it was written where it cannot be read."""
    if not run.config_text:
        return ""
    if not run.config:
        return folded("Config", f"<pre>{escape(run.config_text)}</pre>", id_="config")
    keys = typed_keys(run.overrides)
    lines = list(_lines(run.config, keys))
    marked = sum(line.startswith("<mark") for line in lines)
    count = f", {marked} lines of it typed" if marked else ""
    text = "\n".join(lines)
    return folded(f"Config{count}", f'<pre class="config">{text}</pre>', id_="config")


def typed_keys(overrides: Sequence[str]) -> set[str]:
    """`+a.b=c` -> `a.b`, `group@package=option` -> `group`; a deletion leaves nothing to mark."""
    keys = {word.lstrip("+").partition("=")[0] for word in overrides if not word.startswith("~")}
    return {key.partition("@")[0].replace("/", ".") for key in keys}


def shown_config(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config without what is left out."""
    shown: dict[str, Any] = {}
    for name, value in config.items():
        if f"{prefix}{name}" not in LEFT_OUT:
            inside = isinstance(value, dict)
            shown[str(name)] = shown_config(value, f"{prefix}{name}.") if inside else value
    return shown


def _lines(config: dict[str, Any], keys: set[str]) -> Iterator[str]:
    """YAML, line by line. A key that was typed is marked; of a group that was chosen, its first line."""
    return _inner(shown_config(config), "", "", keys)


def _inner(node: dict[str, Any], prefix: str, indent: str, keys: set[str]) -> Iterator[str]:
    for name, value in node.items():
        path = f"{prefix}{name}"
        nested = isinstance(value, dict) and value
        line = f"{indent}{name}:" if nested else f"{indent}{name}: {_scalar(value)}"
        typed = path in keys
        yield f"<mark>{escape(line)}</mark>" if typed else escape(line)
        if nested:
            yield from _inner(value, f"{path}.", f"{indent}  ", keys)


def _scalar(value: Any) -> str:
    """A value on one line, as YAML has it."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
