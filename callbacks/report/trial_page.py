"""Write the page of a trial: its console output and curves. No Lightning."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .charts.figures import lines_figure
from .html import write_mode_page


def write_trial_page(
    path: Path, title: str, text: Sequence[str], figures: Sequence[Mapping[str, Any]], *, about: Mapping[str, Any]
) -> None:
    """Write the page.

    Args:
        path: File to write.
        title: Plain text.
        text: Printed console lines.
        figures: Arguments of `lines_figure`, one mapping per picture.
        about: What the page is about, see `write_mode_page`.

    Raises:
        OSError: The file cannot be written.
    """
    drawn = [lines_figure(**figure) for figure in figures]
    write_mode_page(path, "trial.jinja", title, about=about, figures=drawn, lines=text, drawn=drawn)
