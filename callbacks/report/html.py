"""Build self-contained HTML pages: frame, cards, tables and formatted values. No Lightning."""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..files import write_atomically
from ..progress.text import clock_text
from .charts.axis import value_label
from .charts.json_data import as_json

ASSETS = Path(__file__).parent / "assets"


def render_page(*, title: str, body: str, data: dict[str, Any], styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Return one HTML file with its styles, data and scripts inlined.

    Args:
        title: Page title.
        body: Escaped HTML.
        data: Data for the scripts, written as JSON.
        styles: File names in `assets/`.
        scripts: File names in `assets/`, in execution order.
    """
    style = "".join((ASSETS / name).read_text(encoding="utf-8") for name in styles)
    script = "".join((ASSETS / name).read_text(encoding="utf-8") for name in scripts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="generator" content="lightning-recipes"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>{body}</main>"
        f'<script type="application/json" id="data">{as_json(data)}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def write_page(path: Path, text: str) -> None:
    """Write a file atomically: a reader finds either the old page or the new one."""
    # half of a surrogate pair, in a text from a run's files, has no bytes in UTF-8
    write_atomically(path, text.encode("utf-8", "backslashreplace").decode())


def quoted_link(path: str) -> str:
    """Return a relative path as a quoted link: unquoted, a folder `javascript:…` would run code, `a#b` be cut off."""
    return escape(quote(path.encode("utf-8", "surrogateescape")))


def anchor_id(title: str) -> str:
    """Return the HTML id of a section."""
    return "charts-" + "".join(c if c.isascii() and c.isalnum() else "-" for c in title.lower())


def zoom_bar(links: Sequence[tuple[str, str]]) -> str:
    """Return the sticky bar at the top: links to the sections, and buttons that select the range of steps.

    Args:
        links: Id and title of each section.
    """
    nav = "".join(f'<a href="#{id_}">{escape(title)}</a>' for id_, title in links)
    buttons = "".join(
        f'<button type="button" data-zoom="{action}" title="{title}" aria-label="{title}">{sign}</button>'
        for action, sign, title in (
            ("earlier", "&lsaquo;", "earlier steps"),
            ("out", "&minus;", "zoom out"),
            ("in", "+", "zoom in"),
            ("later", "&rsaquo;", "later steps"),
            ("all", "all", "all steps (Escape, or double-click a chart)"),
        )
    )
    return (
        f'<div class="bar"><nav>{nav}</nav><div class="zoom" role="toolbar"'
        f' aria-label="steps shown" hidden><output></output>{buttons}</div></div>'
    )


def section(title: str, content: str, *, id_: str = "") -> str:
    """Return a card under a heading; empty if there is no content."""
    id_attribute = f' id="{id_}"' if id_ else ""
    return (
        f'<section{id_attribute}><h2>{escape(title)}</h2><div class="card">{content}</div></section>' if content else ""
    )


def folded(title: str, content: str, *, id_: str = "") -> str:
    """Return a collapsed card that opens when its title is clicked."""
    id_attribute = f' id="{id_}"' if id_ else ""
    return f'<details{id_attribute}><summary>{escape(title)}</summary><div class="card">{content}</div></details>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, css: str = "figures") -> str:
    """Return a table with a heading row.

    Args:
        heads: Plain text.
        rows: Cells as escaped HTML.
        css: `figures` right-aligns all columns but the first; `list` left-aligns all.
    """
    line = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="{css}"><thead><tr>{line}</tr></thead><tbody>{body}</tbody></table>'


def facts_table(title: str, values: dict[str, Any]) -> str:
    """Return a card with one row per name and value; a nested object takes one row."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(_fact_text(value))}</td></tr>"
        for name, value in values.items()
        if value not in ([], {})
    )
    return section(title, f"<table>{rows}</table>") if rows else ""


def _fact_text(value: Any) -> str:
    if not isinstance(value, dict):
        return value_text(value)
    return ", ".join(f"{name} {value_text(inner)}" for name, inner in flatten(value))


def value_text(value: Any) -> str:
    """Return a value as human-readable text; None becomes `unknown`."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return value_label(value)
    if isinstance(value, list):  # `8 x NVIDIA H100` instead of the name eight times
        counts = Counter(map(str, value)).items()
        return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts)
    return str(value)


def measure_text(value: float, measure: str) -> str:
    """Return a summary value as human-readable text."""
    if measure == "seconds":
        return clock_text(value)
    if measure == "mfu":
        return f"{value:.1%}"
    return f"{value:.3g}" if measure == "peak_memory_gib" else value_text(value)


def flatten(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the leaves of nested objects with dotted names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
