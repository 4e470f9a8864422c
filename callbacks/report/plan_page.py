"""Write the page of a plan: its console output and a chart of one rank's memory over a step. No Lightning."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..progress.text import clock_text
from .charts.figures import Figure, lines_figure, stack_figure
from .html import write_mode_page
from .run_record import is_finite


def write_plan_page(path: Path, plan: Mapping[str, Any], lines: Sequence[str], *, about: Mapping[str, Any]) -> None:
    """Write the page.

    Args:
        path: File to write.
        plan: Content of `plan.json`.
        lines: Printed console lines.
        about: What the page is about, see `write_mode_page`.

    Raises:
        OSError: The file cannot be written.
    """
    memory, scaling = memory_figure(plan), list(_scaling_figures(plan))
    write_mode_page(
        path,
        "plan.jinja",
        "Plan",
        about=about,
        pills={"fits": "good"} if plan.get("fits") else {"does not fit": "bad"},
        figures=[*([] if memory is None else [memory]), *scaling],
        tiles=list(_tiles(plan)),
        memory=memory,
        communication=plan.get("communication"),
        scaling=scaling,
        lines=lines,
    )


def _tiles(plan: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and note of each total of the plan; unknown ones are left out."""
    of = f"of {plan['usable_gib']:,.4g} GiB" if plan.get("usable_gib") else "GiB"
    numbers = {
        "parameters": (plan.get("num_parameters"), "{:,}", ""),
        "ranks": (plan.get("num_ranks"), "{:,}", str(plan.get("hardware", ""))),
        "memory of a rank": (plan.get("peak_memory_gib"), "{:,.4g}", of),
        "a step": (plan.get("step_seconds"), "{:.3g}", "s"),
        "tokens/s": (plan.get("tokens_per_second"), "{:,.0f}", ""),
        "MFU": (plan.get("mfu"), "{:.1%}", ""),
        "price": (plan.get("dollars"), "${:,.2f}" if (plan.get("dollars") or 0) >= 0.005 else "< $0.01", ""),
        "on disk": (plan.get("disk_gib"), "{:,.4g}", "GiB"),
    }
    yield from ((name, text.format(value), note) for name, (value, text, note) in numbers.items() if value is not None)
    if plan.get("hours") is not None:
        yield "the run", clock_text(3600 * plan["hours"]), ""


def memory_figure(plan: Mapping[str, Any]) -> Figure | None:
    """Return the chart of memory over one step; None if the plan has none.

    Raises:
        ValueError: The plan comes from a damaged file; the message says what is wrong in it.
    """
    timeline, limit = plan.get("timeline"), plan.get("usable_gib")
    if timeline is None:
        return None
    gib, places = (timeline.get(name) for name in ("gib", "sections")) if isinstance(timeline, dict) else (None, None)
    if (
        not isinstance(gib, dict)
        or not gib
        or not isinstance(places, list)
        or not all(isinstance(p, str) for p in places)
    ):
        raise ValueError("its timeline has no gib by name, and sections")
    for name, series in gib.items():
        is_series = isinstance(series, list) and all(map(is_finite, series))
        if not is_series or not 0 < len(series) == len(places) or not is_finite(float(sum(series))):
            raise ValueError(f"its timeline has no GiB of {name} for each of {len(places)} sections")
    if limit is not None and not is_finite(limit):
        raise ValueError("its usable_gib is not a finite number")
    return stack_figure(gib, places=places, limit=limit, unit="GiB per rank")


def _scaling_figures(plan: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield charts of the run on increasing numbers of ranks; none if scaling was not planned."""
    curves = plan.get("scaling")
    if not isinstance(curves, Mapping):
        return
    counted = "samples" if plan.get("tokens") is None else "tokens"
    for title, key in ((f"{counted}/s", f"{counted}_per_second"), ("GiB per rank", "memory_gib")):
        lines = {
            strategy: [(point["ranks"], point[key]) for point in points if point["fits"]]
            for strategy, points in curves.items()
        }
        yield lines_figure(f"{title}, by ranks, where it fits", lines, marks={}, log_x=True, log_y=True)
