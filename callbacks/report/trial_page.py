"""Write the page of a trial: its console output and curves. No Lightning."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .charts.lines import lines_figure
from .header import mode_head, page_title
from .html import render_page, section, write_page


def write_trial_page(
    path: Path, title: str, text: Sequence[str], figures: Sequence[Mapping[str, Any]], *, about: Mapping[str, Any]
) -> None:
    """Write the page.

    Args:
        path: File to write.
        title: Plain text.
        text: Printed console lines.
        figures: Arguments of `lines_figure`, one mapping per picture.
        about: What the page is about, see `mode_head`.

    Raises:
        OSError: The file cannot be written.
    """
    printed = section("What was found", f"<pre>{escape(chr(10).join(text))}</pre>")
    drawn = section("Curves", "".join(lines_figure(**figure) for figure in figures))
    body, named = f"{mode_head(title, about)}{printed}{drawn}", page_title(title, about)
    write_page(path, render_page(title=named, body=body, data={}, styles=["page.css", "charts.css"], scripts=[]))
