"""Runs side by side as one page that opens offline: table, parameters, bars, curves over each other. No Lightning."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..charts.json_data import packed
from ..charts.series import step_range, value_range
from ..charts.svg import figure, padded, spans
from ..dashboard import Panel, Section, get_sections, sections_for
from ..html import anchor_id, whole_page, words, write_page, zoom_bar
from ..run_record import metric_names
from .parallel import parallel_html
from .runs import ComparedRun, common_parent, in_order, read_runs
from .table import (
    bars_html,
    differences,
    get_title,
    runs_table,
    shown_value,
)
from .values import short_names

STYLES = ("page.css", "charts.css", "compare.css")
SCRIPTS = ("axis.js", "charts.js", "compare.js", "zoom.js")


def page_html(
    runs: Sequence[ComparedRun], sections: Sequence[Section], path: Path, *, sort: str
) -> str:
    """The whole page. Whatever came from a file of a run is escaped."""
    charts: list[dict[str, Any]] = []
    curves = [
        (section.title, _charts(section, runs, charts, i == 0))
        for i, section in enumerate(sections)
    ]
    curves = [(title, html) for title, html in curves if html]
    places = [("runs", "runs"), *((anchor_id(title), title) for title, _ in curves)]
    steps = [step for chart in charts for step in chart.pop("range")]
    first, last = padded(step_range(steps)) if steps else (0, 1)
    body = (
        f"{_head(runs)}{zoom_bar(places)}"
        f'<section id="runs">{runs_table(runs, path, sort=sort)}</section>'
        f"{_of_runs(sections, runs, sort)}{_legend(runs) if curves else ''}"
        + "".join(
            f'<section id="{anchor_id(title)}"><h2>{escape(title)}</h2>{html}</section>'
            for title, html in curves
        )
        + differences(runs)
        + f"<footer>{escape(str(common_parent([run.folder for run in runs])))}</footer>"
    )
    data = {
        "first": first,
        "last": last,
        "charts": charts,
        "marks": [],
        "runs": [_run_data(run, sort) for run in runs],
    }
    return whole_page(title=_title(runs), body=body, data=data, styles=STYLES, scripts=SCRIPTS)


def _title(runs: Sequence[ComparedRun]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def _head(runs: Sequence[ComparedRun]) -> str:
    counts = Counter(run.status for run in runs)
    told = " · ".join(f"{count} {escape(status)}" for status, count in counts.most_common())
    names = short_names(list(runs[0].parameters)).values()
    shown = [*names][:12]
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    differ = f" · they differ in {escape(', '.join(shown))}{more}" if shown else ""
    return f'<header><div class="head"><h1>{_title(runs)}</h1></div><p class="where">{told}{differ}</p></header>'


def _of_runs(sections: Sequence[Section], runs: Sequence[ComparedRun], sort: str) -> str:
    """Panels that have a mark for each run; of one run there is nothing to compare."""
    panels = [panel for section in sections for panel in section.panels]
    figures = (
        "".join(_of_runs_panel(panel, runs, sort) for panel in panels) if len(runs) > 1 else ""
    )
    return f'<div class="charts across-runs">{figures}</div>' if figures else ""


def _of_runs_panel(panel: Panel, runs: Sequence[ComparedRun], sort: str) -> str:
    if panel.kind == "bar":
        written = list(dict.fromkeys(name for run in runs for name in run.best))
        return "".join(bars_html(panel.title, name, runs) for name in panel.metrics_among(written))
    if panel.kind == "parallel" and runs[0].parameters:
        return parallel_html(panel.title, sort, panel.parameters, runs)
    return ""


def _charts(
    section: Section, runs: Sequence[ComparedRun], charts: list[dict[str, Any]], leads: bool
) -> str:
    """A chart for each metric, drawn by the script from what is added to `charts`."""
    written = list(dict.fromkeys(name for run in runs for name in run.curves))
    drawn = [
        (panel, name)
        for panel in section.panels
        if panel.kind == "line"
        for name in panel.metrics_among(written)
    ]
    figures = []
    for (panel, name), span in zip(drawn, spans(len(drawn), leads=leads), strict=True):
        chart = _chart_data(panel, name, runs)
        note = '<span class="note">log scale</span>' if chart["log"] else ""
        caption = f'<span class="note">{escape(name)}</span>{note}'
        figures.append(figure(panel.title, caption, index=len(charts), span=span))
        charts.append(chart)
    lead = " lead" if leads else ""
    return f'<div class="charts{lead}">{"".join(figures)}</div>' if figures else ""


def _chart_data(panel: Panel, name: str, runs: Sequence[ComparedRun]) -> dict[str, Any]:
    having = [(i, run.name, run.curves[name]) for i, run in enumerate(runs) if name in run.curves]
    values = [value for _, _, points in having for _, value in points if math.isfinite(value)]
    steps = [step for _, _, points in having for step, _ in points]
    return {
        "log": value_range(values, may_be_log=panel.log_scale)[1],
        "curves": [
            {"run": i, "name": run_name, **packed(points)} for i, run_name, points in having
        ],
        "range": (min(steps), max(steps)),
    }


def _run_data(run: ComparedRun, sort: str) -> dict[str, Any]:
    """A run's color, and the line that tells of it."""
    value = run.values[sort]
    short = short_names(list(run.parameters))
    facts = [f"{short[name]} {words(v)}" for name, v in run.parameters.items() if v is not None]
    shown = "unknown" if value is None else shown_value(value, sort)
    return {
        "css": run.color.css,
        "hue": run.color.hue,
        "told": " · ".join([run.name, f"{get_title(sort)} {shown}", *facts[:12]]),
    }


def _legend(runs: Sequence[ComparedRun]) -> str:
    """A key for each run, which shows or hides it; and some at once."""
    keys = "".join(
        f'<button type="button" {run.color.attributes("key run")} data-run="{i}" data-toggle="{i}"'
        f' aria-pressed="true">{escape(run.name)}</button>'
        for i, run in enumerate(runs)
    )
    some = "".join(
        f'<button type="button" data-show="{number}">{word}</button>'
        for word, number in (("all", len(runs)), ("best 10", 10), ("none", 0))
        if number != 10 or len(runs) > 10
    )
    return f'<div class="keys"><span class="some">show {some}</span>{keys}</div>'


def write_comparison(
    folders: Sequence[Path],
    path: Path,
    *,
    sort: str = "val_loss",
    dashboard: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Write a page that compares the runs in `folders`: those that failed or still run are in it too.

    Args:
        path: The HTML file.
        sort: A number of `summary.json` or a metric; best first, by whether its name is of a loss or of an accuracy.
        dashboard: Sections of panels, as in `conf/dashboard/default.yaml`; None: every metric, by its prefix.

    Raises:
        ValueError: `folders` is empty.
        LookupError: No run has `sort` though some have other numbers.
    """
    if not folders:
        raise ValueError("there is no run to compare")
    sections = _sections(folders, sort) if dashboard is None else get_sections(dashboard)
    runs = read_runs(in_order(folders), sections, sort=sort)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(path, page_html(runs, sections, path, sort=sort))


def _sections(folders: Sequence[Path], sort: str) -> list[Section]:
    """For runs that come without a dashboard: their metrics by prefix, and their parameters."""
    names = [name for folder in folders for name in metric_names(folder / "metrics.csv")]
    panel = Panel(title="what the runs differ in", metrics=(sort,), kind="parallel")
    return [*sections_for(dict.fromkeys(names)), Section(title="sweep comparison", panels=(panel,))]
