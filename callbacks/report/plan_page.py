"""A page for a plan: the lines of the console and a picture of a rank's memory over one step. No Lightning."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .charts.stack import stack_figure
from .html import render_page, section, write_page


def write_plan_page(path: Path, plan: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Write the page.

    Args:
        path: The file.
        plan: `plan.json`.
        lines: What was printed.

    Raises:
        OSError: The file cannot be written.
    """
    printed = f"<pre>{escape(chr(10).join(lines))}</pre>"
    body = f"<h1>Plan</h1>{section('What the run needs', printed)}{memory_section(plan)}"
    write_page(path, render_page(title="Plan", body=body, data={}, styles=["page.css", "charts.css"], scripts=[]))


def memory_section(plan: Mapping[str, Any]) -> str:
    """Return the picture of memory over one step; empty if the plan has none."""
    timeline = plan.get("timeline")
    if not isinstance(timeline, Mapping):
        return ""
    figure = stack_figure(
        timeline["gib"], places=timeline["sections"], limit=plan.get("usable_gib"), unit="GiB on a rank"
    )
    return section("Memory over one step, as planned", figure)
