"""Write the page of a plan: its console output and a chart of one rank's memory over a step. No Lightning."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..progress.text import clock_text
from .charts.lines import lines_figure
from .charts.stack import stack_figure
from .header import mode_head, page_title
from .html import render_page, section, table, write_page


def write_plan_page(path: Path, plan: Mapping[str, Any], lines: Sequence[str], *, about: Mapping[str, Any]) -> None:
    """Write the page.

    Args:
        path: File to write.
        plan: Content of `plan.json`.
        lines: Printed console lines.
        about: What the page is about, see `mode_head`.

    Raises:
        OSError: The file cannot be written.
    """
    printed = f"<pre>{escape(chr(10).join(lines))}</pre>"
    pills = {"fits": "good"} if plan.get("fits") else {"does not fit": "bad"}
    body = f"{mode_head('Plan', about, pills=pills)}{_tiles(plan)}{memory_section(plan)}"
    body += _communication_section(plan) + _scaling_section(plan) + section("What was printed", printed)
    title = page_title("Plan", about)
    write_page(path, render_page(title=title, body=body, data={}, styles=["page.css", "charts.css"], scripts=[]))


def _tiles(plan: Mapping[str, Any]) -> str:
    """Return the totals of the plan; unknown ones are left out."""
    of = f" <small>of {plan['usable_gib']:,.4g} GiB</small>" if plan.get("usable_gib") else ""
    numbers = {
        "parameters": (plan.get("num_parameters"), "{:,}", ""),
        "ranks": (plan.get("num_ranks"), "{:,}", f" <small>{escape(str(plan.get('hardware', '')))}</small>"),
        "memory of a rank": (plan.get("peak_memory_gib"), "{:,.4g}", of or " <small>GiB</small>"),
        "a step": (plan.get("step_seconds"), "{:.3g}", " <small>s</small>"),
        "tokens/s": (plan.get("tokens_per_second"), "{:,.0f}", ""),
        "MFU": (plan.get("mfu"), "{:.1%}", ""),
        "price": (plan.get("dollars"), "${:,.2f}" if (plan.get("dollars") or 0) >= 0.005 else "&lt; $0.01", ""),
        "on disk": (plan.get("disk_gib"), "{:,.4g}", " <small>GiB</small>"),
    }
    shown = {name: f"{text.format(value)}{note}" for name, (value, text, note) in numbers.items() if value is not None}
    if plan.get("hours") is not None:
        shown["the run"] = clock_text(3600 * plan["hours"])
    tiles = "".join(f'<div class="tile"><dt>{name}</dt><dd>{value}</dd></div>' for name, value in shown.items())
    return f'<dl class="tiles">{tiles}</dl>'


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
