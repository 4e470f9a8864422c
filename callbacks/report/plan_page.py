"""Write the page of a plan: its console output and a chart of one rank's memory over a step. No Lightning."""

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
        path: File to write.
        plan: Content of `plan.json`.
        lines: Printed console lines.

    Raises:
        OSError: The file cannot be written.
    """
    printed = f"<pre>{escape(chr(10).join(lines))}</pre>"
    body = f"<h1>Plan</h1>{section('What the run needs', printed)}{memory_section(plan)}"
    body += _communication_section(plan) + _scaling_section(plan)
    write_page(path, render_page(title="Plan", body=body, data={}, styles=["page.css", "charts.css"], scripts=[]))


def memory_section(plan: Mapping[str, Any]) -> str:
    """Return the chart of memory over one step; empty if the plan has none."""
    timeline = plan.get("timeline")
    if not isinstance(timeline, Mapping):
        return ""
    figure = stack_figure(
        timeline["gib"], places=timeline["sections"], limit=plan.get("usable_gib"), unit="GiB per rank"
    )
    return section("Memory over one step, as planned", figure)


def _communication_section(plan: Mapping[str, Any]) -> str:
    """Return the traffic along each mesh dimension; empty if there is none or it was not planned."""
    rows = plan.get("communication")
    if not rows:
        return ""
    heads = ("dimension", "ranks", "GiB sent per rank and step", "seconds", "not hidden by computation, s")
    keys = ("dimension", "ranks", "gib", "seconds", "exposed_seconds")
    lines = [[_show(row[key]) for key in keys] for row in rows]
    return section("Communication, as planned", table(heads, lines))


def _show(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _scaling_section(plan: Mapping[str, Any]) -> str:
    """Return charts of the run on increasing numbers of ranks; empty if scaling was not planned."""
    curves = plan.get("scaling")
    if not isinstance(curves, Mapping):
        return ""
    counted = "samples" if plan.get("tokens") is None else "tokens"
    pictures = ((f"{counted}/s", f"{counted}_per_second"), ("GiB per rank", "memory_gib"))
    drawn = []
    for title, key in pictures:
        lines = {
            strategy: [(point["ranks"], point[key]) for point in points if point["fits"]]
            for strategy, points in curves.items()
        }
        drawn.append(lines_figure(f"{title}, by ranks, where it fits", lines, marks={}, log_x=True, log_y=True))
    return section("More ranks, as planned", "".join(drawn))
