"""The frame of a page that opens offline: style, body, data and script in one file. No Lightning."""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .charts.axis import value_label
from .charts.json_data import as_json

ASSETS = Path(__file__).parent / "assets"


def whole_page(
    *, title: str, body: str, data: dict[str, Any], styles: Sequence[str], scripts: Sequence[str]
) -> str:
    """HTML; `styles` and `scripts` are files beside this one. `body` is escaped already."""
    style = "".join((ASSETS / name).read_text(encoding="utf-8") for name in styles)
    script = "".join((ASSETS / name).read_text(encoding="utf-8") for name in scripts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>{body}</main>"
        f'<script type="application/json" id="data">{as_json(data)}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def write_page(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def anchor_id(title: str) -> str:
    """An id for the heading of a section."""
    return "charts-" + "".join(c if c.isascii() and c.isalnum() else "-" for c in title.lower())


def zoom_bar(places: Sequence[tuple[str, str]]) -> str:
    """Stays at the top: where things are on the page, and which steps are shown. `places` are id and title."""
    links = "".join(f'<a href="#{id_}">{escape(title)}</a>' for id_, title in places)
    buttons = "".join(
        f'<button type="button" data-zoom="{word}" title="{title}" aria-label="{title}">{sign}</button>'
        for word, sign, title in (
            ("back", "&lsaquo;", "earlier steps"),
            ("out", "&minus;", "zoom out"),
            ("in", "+", "zoom in"),
            ("on", "&rsaquo;", "later steps"),
            ("all", "all", "all steps (Escape, or double-click in a chart)"),
        )
    )
    return (
        f'<div class="bar"><nav>{links}</nav><div class="zoom" role="toolbar"'
        f' aria-label="steps shown" hidden><output></output>{buttons}</div></div>'
    )


def words(value: Any) -> str:
    """One value as a person reads it; None is `unknown`."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return value_label(value)
    if isinstance(value, list):  # `8 x NVIDIA H100`, not eight times its name
        counts = Counter(map(str, value)).items()
        return ", ".join(f"{count} x {word}" if count > 1 else word for word, count in counts)
    return str(value)


def flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested objects as one level, with dots in the names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def facts(title: str, values: dict[str, Any]) -> str:
    """Names and values, a row each; what is nested stands in one row."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(_fact(value))}</td></tr>"
        for name, value in values.items()
        if value not in ([], {})
    )
    return section(title, f"<table>{rows}</table>") if rows else ""


def _fact(value: Any) -> str:
    if not isinstance(value, dict):
        return words(value)
    return ", ".join(f"{name} {words(inner)}" for name, inner in flat(value))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a heading row; cells are escaped already. Columns after the first are figures."""
    first, *others = heads
    line = f"<th>{escape(first)}</th>" + "".join(f"<th>{escape(one)}</th>" for one in others)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="figures"><thead><tr>{line}</tr></thead><tbody>{body}</tbody></table>'


def section(title: str, content: str, *, id_: str = "") -> str:
    """A card under a heading; nothing where there is nothing to show."""
    place = f' id="{id_}"' if id_ else ""
    return (
        f'<section{place}><h2>{escape(title)}</h2><div class="card">{content}</div></section>'
        if content
        else ""
    )


def folded(title: str, content: str, *, id_: str = "") -> str:
    """A card that opens on request."""
    place = f' id="{id_}"' if id_ else ""
    return (
        f"<details{place}><summary>{escape(title)}</summary>"
        f'<div class="card">{content}</div></details>'
    )
