"""The frame of a page that opens offline: style, body, data and script in one file. No Lightning."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from callbacks.curves_data import as_json

HERE = Path(__file__).parent


def whole_page(
    *, title: str, body: str, data: dict[str, Any], styles: Sequence[str], scripts: Sequence[str]
) -> str:
    """HTML; `styles` and `scripts` are files beside this one. `body` is escaped already."""
    style = "".join((HERE / name).read_text(encoding="utf-8") for name in styles)
    script = "".join((HERE / name).read_text(encoding="utf-8") for name in scripts)
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


def place_of(title: str) -> str:
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
