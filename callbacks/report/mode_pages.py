"""Write the pages of modes: plans, preflights, prepared documents and trials, with what they printed. No Lightning."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..progress.text import clock_text
from .charts.figures import Figure, lines_figure, stack_figure
from .html import render, write_mode_page, write_page
from .images import encode_png
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
        "samples/s": (None if "tokens_per_second" in plan else plan.get("samples_per_second"), "{:,.1f}", ""),
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


# Write the page of a preflight: a table of its checks, and input images as the model sees them. No Lightning.

_WIDTH = 96  # displayed width of an image, so that small ones are visible
_CLASSES = {"fail": "bad", "warn": "warn", "pass": "good"}  # in the order of the rows; others come last
_TOTALS = {"fail": "failed", "warn": "to look at", "pass": "passed"}


def write_preflight_page(
    path: Path,
    results: Sequence[Mapping[str, Any]],
    images: Sequence[tuple[Any, int]],
    *,
    about: Mapping[str, Any],
) -> None:
    """Write the page.

    Args:
        path: File to write.
        results: One mapping per check: `check`, `status`, `found` and `remedy`.
        images: Nested lists [C][H][W] of numbers, each with its class.
        about: What the page is about, see `write_mode_page`.

    Raises:
        OSError: The file cannot be written.
    """
    order = [*_CLASSES]
    statuses = [result["status"] for result in results]
    counts = {status: statuses.count(status) for status in order}
    by_status = sorted(results, key=lambda result: [*order, result["status"]].index(result["status"]))
    write_mode_page(
        path,
        "preflight.jinja",
        "Preflight",
        about=about,
        pills={f"{count} {_TOTALS[status]}": _CLASSES[status] for status, count in counts.items() if count},
        checks=[result for result in by_status if result["status"] != "look"],
        classes=_CLASSES,
        read=[result["found"] for result in results if result["status"] == "look"],
        images=[(_png(channels), len(channels[0]), len(channels[0][0]), label) for channels, label in images],
        width=_WIDTH,
    )


def _png(channels: Any) -> str:
    """Return an image as base64 of a PNG, scaled to its own range; RGB of three channels, else gray of the first."""
    values = [value for channel in channels for row in channel for value in row]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    colors = channels if len(channels) == 3 else channels[:1]
    rows = [
        bytes(round(255 * (values[x] - low) / span) for x in range(len(row[0])) for values in row)
        for row in zip(*colors, strict=True)
    ]
    return encode_png(rows, num_channels=len(colors))


# Write the page of prepared documents: what each step and rule dropped, with examples. No Lightning.

# reasons for dropping in the order of the steps, with labels for what remains after each
_STEPS = {
    "unreadable": "can be read",
    "empty": "have text",
    "quality": "pass the rules",
    "contaminated": "repeat no evaluation set",
    "exact copy": "equal no earlier one",
    "near copy": "resemble no earlier one",
}


def write_prepare_page(path: Path, report: Mapping[str, Any]) -> None:
    """Write the page.

    Args:
        path: File to write.
        report: Content of `report.json`.

    Raises:
        OSError: The file cannot be written.
    """
    domains = report["domains"]
    page = render(
        "prepare.jinja",
        title="Prepared documents",
        report=report,
        steps=list(_steps_left(report)),
        reasons=sorted({reason for domain in domains.values() for reason in domain["dropped"]}),
        settings={str(name): _setting(value) for name, value in report["settings"].items()},
    )
    write_page(path, page)


def _steps_left(report: Mapping[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """Yield what remains after each step: its label, documents, bytes, and the documents that the step dropped."""
    left, left_bytes = report["documents"], report["bytes"]
    yield "were read", left, left_bytes, 0
    for reason, title in _STEPS.items():
        if count := report["dropped"].get(reason, 0):
            left, left_bytes = left - count, left_bytes - report["dropped_bytes"][reason]
            yield title, left, left_bytes, count


def _setting(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_setting(inner)}" for name, inner in value.items()) or "none"
    return "null" if value is None else str(value)


# Write the page of a trial: its console output and curves. No Lightning.


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
