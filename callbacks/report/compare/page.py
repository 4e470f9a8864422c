"""Write a self-contained page that compares runs: table, parameters, bars, overlaid curves. No Lightning."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..charts.json_data import packed
from ..charts.series import step_range, value_range
from ..charts.svg import column_spans, figure, padded_range
from ..dashboard import Panel, Section, get_sections, sections_for
from ..html import anchor_id, measure_text, render_page, value_text, write_page, zoom_bar
from ..run_record import metric_names
from .parallel import parallel_html
from .runs import ComparedRun, common_parent, in_natural_order, read_runs
from .table import bars_html, differences_table, get_title, runs_table
from .values import short_names

STYLES = ("page.css", "charts.css", "compare.css")
SCRIPTS = ("axis.js", "charts.js", "compare.js", "zoom.js")
MAX_NAMED_PARAMETERS = 12


def write_comparison(
    folders: Sequence[Path | str],
    path: Path | str,
    *,
    sort: str = "val_loss",
    dashboard: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Write a page that compares the runs in `folders`, including failed and unfinished ones.

    Args:
        folders: Run folders, or any folders with a `metrics.csv`.
        path: The HTML file to write.
        sort: A key of `summary.json` or a metric. The best run comes first: the highest value if the name contains a
            word such as accuracy or mfu, else the lowest.
        dashboard: Sections of panels, as in `conf/dashboard/default.yaml`; None draws all metrics, grouped by prefix.

    Raises:
        ValueError: `folders` is empty or a single path.
        LookupError: No run has `sort`, though some have other values.
    """
    if isinstance(folders, (str, Path)):
        raise ValueError(
            f"folders is one path, {str(folders)!r}; runs are compared with each other; give a list of paths"
        )
    if not folders:
        raise ValueError("there is no run to compare")
    paths, path = [Path(folder) for folder in folders], Path(path)
    sections = _default_sections(paths, sort) if dashboard is None else get_sections(dashboard)
    runs = read_runs(in_natural_order(paths), sections, sort=sort)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(path, page_html(runs, sections, path, sort=sort))


def _default_sections(folders: Sequence[Path], sort: str) -> list[Section]:
    """Return one section per metric prefix, and one for the parameters that differ."""
    names = [name for folder in folders for name in metric_names(folder / "metrics.csv")]
    panel = Panel(title="parameters that differ", metrics=(sort,), kind="parallel")
    return [*sections_for(dict.fromkeys(names)), Section(title="sweep comparison", panels=(panel,))]


def page_html(runs: Sequence[ComparedRun], sections: Sequence[Section], path: Path, *, sort: str) -> str:
    """Return the complete HTML page; all text from the runs' files is escaped."""
    charts: list[dict[str, Any]] = []
    groups = [(section.title, _charts_html(section, runs, charts, leads=i == 0)) for i, section in enumerate(sections)]
    groups = [(title, html) for title, html in groups if html]
    links = [("runs", "runs"), *((anchor_id(title), title) for title, _ in groups)]
    steps = [step for chart in charts for step in chart.pop("range")]
    first, last = padded_range(step_range(steps)) if steps else (0, 1)
    body = (
        f"{_head(runs)}{zoom_bar(links)}"
        f'<section id="runs">{runs_table(runs, path, sort=sort)}</section>'
        f"{_across_runs(sections, runs, sort)}{_run_legend(runs) if groups else ''}"
        + "".join(
            f'<section id="{anchor_id(title)}"><h2>{escape(title)}</h2>{html}</section>' for title, html in groups
        )
        + differences_table(runs)
        + f"<footer>{escape(str(common_parent([run.folder for run in runs])))}</footer>"
    )
    data = {
        "first": first,
        "last": last,
        "charts": charts,
        "marks": [],
        "runs": [_run_data(run, sort) for run in runs],
    }
    return render_page(title=_title(runs), body=body, data=data, styles=STYLES, scripts=SCRIPTS)


def _title(runs: Sequence[ComparedRun]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def _head(runs: Sequence[ComparedRun]) -> str:
    """Return the number of runs, how many have each status, and the parameters that differ."""
    counts = Counter(run.status for run in runs)
    statuses = " · ".join(f"{count} {escape(status)}" for status, count in counts.most_common())
    names = list(short_names(list(runs[0].parameters)).values())
    listed = escape(", ".join(names[:MAX_NAMED_PARAMETERS]))
    num_more = len(names) - MAX_NAMED_PARAMETERS
    more = f" and {num_more} more" if num_more > 0 else ""
    differ = f" · they differ in {listed}{more}" if names else ""
    return f'<header><div class="head"><h1>{_title(runs)}</h1></div><p class="where">{statuses}{differ}</p></header>'


def _across_runs(sections: Sequence[Section], runs: Sequence[ComparedRun], sort: str) -> str:
    """Return the bar and parallel panels; empty for a single run."""
    if len(runs) == 1:
        return ""
    panels = [panel for section in sections for panel in section.panels]
    figures = "".join(_across_runs_panel(panel, runs, sort) for panel in panels)
    return f'<div class="charts across-runs">{figures}</div>' if figures else ""


def _across_runs_panel(panel: Panel, runs: Sequence[ComparedRun], sort: str) -> str:
    if panel.kind == "bar":
        written = list(dict.fromkeys(name for run in runs for name in run.best))
        return "".join(bars_html(panel.title, name, runs) for name in panel.metrics_among(written))
    if panel.kind == "parallel" and runs[0].parameters:
        return parallel_html(panel.title, sort, panel.parameters, runs)
    return ""


def _charts_html(section: Section, runs: Sequence[ComparedRun], charts: list[dict[str, Any]], *, leads: bool) -> str:
    """Return one frame per metric of a section, and append the script's data for it to `charts`."""
    written = list(dict.fromkeys(name for run in runs for name in run.curves))
    drawn = [(panel, name) for panel in section.panels if panel.kind == "line" for name in panel.metrics_among(written)]
    figures = []
    for (panel, name), span in zip(drawn, column_spans(len(drawn), leads=leads), strict=True):
        chart = _chart_data(panel, name, runs)
        note = '<span class="note">log scale</span>' if chart["log"] else ""
        # two frames of one panel are distinguished by their metrics
        title, also = panel.title, name
        if sum(other is panel for other, _ in drawn) > 1:
            title, also = name, panel.title
        caption = f'<span class="note">{escape(also)}</span>{note}'
        figures.append(figure(title, caption, index=len(charts), span=span))
        charts.append(chart)
    lead = " lead" if leads else ""
    return f'<div class="charts{lead}">{"".join(figures)}</div>' if figures else ""


def _chart_data(panel: Panel, metric: str, runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return the points of a metric for all runs that have it."""
    curves = [(i, run.name, run.curves[metric]) for i, run in enumerate(runs) if metric in run.curves]
    values = [value for _, _, points in curves for _, value in points if math.isfinite(value)]
    steps = [step for _, _, points in curves for step, _ in points]
    return {
        "log": value_range(values, may_be_log=panel.log_scale)[1],
        "curves": [{"run": i, "name": name, **packed(points)} for i, name, points in curves],
        "range": (min(steps), max(steps)),
    }


def _run_data(run: ComparedRun, sort: str) -> dict[str, Any]:
    """Return a run's color and one-line description."""
    value = run.values[sort]
    short = short_names(list(run.parameters))
    parameters = [f"{short[name]} {value_text(v)}" for name, v in run.parameters.items() if v is not None]
    result = f"{get_title(sort)} {'unknown' if value is None else measure_text(value, sort)}"
    return {
        "css": run.color.css,
        "hue": run.color.hue,
        "text": " · ".join([run.name, result, *parameters[:MAX_NAMED_PARAMETERS]]),
    }


def _run_legend(runs: Sequence[ComparedRun]) -> str:
    """Return a button per run that shows or hides it, and buttons for all, the best 10, and none."""
    run_buttons = "".join(
        f'<button type="button" {run.color.attributes("key run")} data-run="{i}" data-toggle="{i}"'
        f' aria-pressed="true" title="show or hide">{escape(run.name)}</button>'
        for i, run in enumerate(runs)
    )
    group_buttons = "".join(
        f'<button type="button" data-show="{number}">{label}</button>'
        for label, number in (("all", len(runs)), ("best 10", 10), ("none", 0))
        if number != 10 or len(runs) > 10
    )
    return f'<div class="keys"><span class="groups">show {group_buttons}</span>{run_buttons}</div>'
