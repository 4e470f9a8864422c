"""A page for a plan: the lines of the console and a picture of a rank's memory over one step. No Lightning."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .charts.lines import lines_figure
from .charts.stack import stack_figure
from .html import render_page, section, table, write_page


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
    body += _communication_section(plan) + _scaling_section(plan)
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


def _communication_section(plan: Mapping[str, Any]) -> str:
    """Return what ranks send along each dimension of the mesh; empty if nothing, or if it was not planned."""
    rows = plan.get("communication")
    if not rows:
        return ""
    heads = ("dimension", "ranks", "GiB a rank sends in a step", "seconds", "not hidden by computation, s")
    keys = ("dimension", "ranks", "gib", "seconds", "exposed_seconds")
    lines = [[_show(row[key]) for key in keys] for row in rows]
    return section("Communication, as planned", table(heads, lines))


def _show(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _scaling_section(plan: Mapping[str, Any]) -> str:
    """Return the pictures of the run on more and more ranks; empty if it was not planned so."""
    curves = plan.get("scaling")
    if not isinstance(curves, Mapping):
        return ""
    counted = "samples" if plan.get("tokens") is None else "tokens"
    pictures = ((f"{counted}/s", f"{counted}_per_second"), ("GiB a rank", "memory_gib"))
    drawn = []
    for title, key in pictures:
        lines = {
            strategy: [(point["ranks"], point[key]) for point in points if point["fits"]]
            for strategy, points in curves.items()
        }
        drawn.append(lines_figure(f"{title}, by ranks, where it fits", lines, marks={}, log_x=True, log_y=True))
    return section("More ranks, as planned", "".join(drawn))
