"""Write the report of one run: a picture and a self-contained HTML page. Takes a second or two, no Lightning."""

import logging
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import tolerating
from .charts.json_data import chart_data
from .charts.png import write_png
from .charts.series import (
    Group,
    Mark,
    get_groups,
    get_marks,
    is_marked,
    metrics_not_drawn,
)
from .charts.svg import (
    MAX_STATIC_BUCKETS,
    MAX_STATIC_POINTS,
    chart_html,
    column_spans,
    padded_range,
)
from .config import command_line_overrides, config_text
from .dashboard import get_sections, sections_for
from .header import diagnosis, findings_section, head, tiles
from .html import anchor_id, facts_table, render_page, write_page, zoom_bar
from .plan_page import memory_section
from .run_record import RecordedFit, RunRecord, add_fit, read_run
from .tables import events_table, operators_table, plan_table, sample_texts, spikes_table

log = logging.getLogger("lightning_recipes")
STYLES = ("page.css", "charts.css")
SCRIPTS = ("axis.js", "charts.js", "zoom.js")


def write_report(
    run_folder: Path | str,
    dashboard: Sequence[Mapping[str, Any]] | None = None,
    *,
    fit: RecordedFit | None = None,
) -> None:
    """Write `report.html` and `curves.png` to a run folder, from the files in it.

    A file that a full disk rejects is logged, and so is a picture for which matplotlib is missing.

    Needs `metrics.csv` unless `fit` is given; uses `summary.json`, `environment.json`, `config.yaml`, `plan.json`,
    `events.jsonl`, `samples.jsonl`, `spikes/` and `profile/operators.json` if they exist. Can be called again.

    Args:
        run_folder: The folder of a run, or any folder with a `metrics.csv`.
        dashboard: Sections of panels, as in `conf/dashboard/default.yaml`; None draws all metrics, grouped by prefix.
        fit: What `RunReport` has recorded of a fit that writes no such files; None reads them.

    Raises:
        FileNotFoundError: There is no `metrics.csv`.
        ValueError: `metrics.csv` has no `step` column.
    """
    run_folder = Path(run_folder)
    run = read_run(run_folder, needs_metrics=fit is None)
    if fit is not None:
        run = add_fit(run, fit)
    sections = sections_for(run.series) if dashboard is None else get_sections(dashboard)
    groups, marks = get_groups(run, sections), get_marks(run.events)
    with tolerating(run_folder / "report.html"):
        write_page(run_folder / "report.html", page_html(run, groups, marks))
    pictures = [chart for group in groups for chart in group.charts if chart.picture]
    if not pictures:
        return
    try:
        with tolerating(run_folder / "curves.png"):
            write_png(run_folder / "curves.png", title=run.name, charts=pictures, marks=marks)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        log.warning("no curves.png: it needs matplotlib; type: pip install matplotlib")


def page_html(run: RunRecord, groups: Sequence[Group], marks: Sequence[Mark]) -> str:
    """Return the complete HTML page; all text from the run's files is escaped."""
    environment = {name: v for name, v in run.environment.items() if name != "overrides"}
    facts = f"{facts_table('Summary', run.summary)}{facts_table('Environment', environment)}"
    tables = [
        sample_texts(run),
        operators_table(run),
        spikes_table(run),
        plan_table(run),
        memory_section(run.plan),
        f'<div class="pair">{facts}</div>',
        events_table(run),
        config_text(run),
    ]
    charts = [chart for group in groups for chart in group.charts]
    links = [(anchor_id(group.title), group.title) for group in groups]
    links += [("spikes", "spike dumps")] if run.spikes else []
    bar = zoom_bar([*links, ("tables", "tables")]) if charts else ""
    body = (
        f"{head(run)}{command_line_overrides(run.overrides)}{findings_section(run)}{diagnosis(run)}{tiles(run)}{bar}{mark_legend(run)}"
        f"{charts_html(groups, marks)}{_not_drawn_note(run, groups)}"
        f'<div id="tables">{"".join(tables)}</div>'
        f"<footer>{escape(str(run.folder))}</footer>"
    )
    first, last = padded_range(charts[0].x_range) if charts else (0, 1)
    data = {
        "first": first,
        "last": last,
        "charts": [chart_data(chart) for chart in charts],
        "marks": [[mark.step, mark.event, mark.from_step] for mark in marks],
    }
    return render_page(title=run.name, body=body, data=data, styles=STYLES, scripts=SCRIPTS)


def charts_html(groups: Sequence[Group], marks: Sequence[Mark]) -> str:
    """Return each group as a heading and a grid of charts without gaps."""
    num_curves = sum(len(chart.curves) for group in groups for chart in group.charts)
    # at most four points per bucket, see downsample.thin
    buckets = max(40, min(MAX_STATIC_BUCKETS, MAX_STATIC_POINTS // (4 * max(1, num_curves))))
    html, index = [], 0
    for number, group in enumerate(groups):
        figures = []
        spans = column_spans(len(group.charts), leads=number == 0)
        for chart, span in zip(group.charts, spans, strict=True):
            figures.append(chart_html(chart, marks, index=index, span=span, max_buckets=buckets))
            index += 1
        html.append(
            f'<section id="{anchor_id(group.title)}"><h2>{escape(group.title)}</h2>'
            f'<div class="charts{" lead" if number == 0 else ""}">{"".join(figures)}</div></section>'
        )
    return "".join(html)


def mark_legend(run: RunRecord) -> str:
    """Return buttons for the kinds of events with their colors and counts; a click shows or hides a kind's marks."""
    events = [str(event["event"]) for event in run.events if is_marked(event)]
    kinds = list(dict.fromkeys(events))  # in order of first occurrence
    buttons = "".join(
        f'<button type="button" class="event e-{escape(kind)}" data-event="{escape(kind)}" aria-pressed="true"'
        f' title="show or hide">{escape(kind.replace("_", " "))} &times; {events.count(kind)}</button>'
        for kind in kinds
    )
    # a click on a button toggles the class `without-<kind>` on the body
    hide = "".join(f".without-{escape(kind)} .plot .e-{escape(kind)} {{ display: none; }}" for kind in kinds)
    dotted = '<span class="dotted">rolled-back steps</span>' if run.rolled_back else ""
    return f'<style>{hide}</style><p class="legend">{buttons}{dotted}</p>' if buttons else ""


def _not_drawn_note(run: RunRecord, groups: Sequence[Group]) -> str:
    names = escape(", ".join(metrics_not_drawn(run, groups)))
    return f'<p class="legend">Not in any panel of the dashboard: {names}</p>' if names else ""
