"""A run as one picture and one page that opens offline: a second or two, no Lightning."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .charts.json_data import chart_data
from .charts.png import write_png
from .charts.series import (
    Group,
    Mark,
    get_groups,
    get_marks,
    is_marked,
    not_drawn,
)
from .charts.svg import STILL_BUCKETS, STILL_POINTS, chart_html, padded, spans
from .config import config_text, typed_words
from .dashboard import get_sections, sections_for
from .header import diagnosis, head, tiles
from .html import anchor_id, facts, whole_page, write_page, zoom_bar
from .run_record import RunRecord, read_run
from .tables import events, evidence, operators, plan_table, samples

STYLES = ("page.css", "charts.css")
SCRIPTS = ("axis.js", "charts.js", "zoom.js")
_EVENT_WORDS = {"lr_backoff": "learning rate cut", "checkpoint_rejected": "checkpoint refused"}


def write_report(run_folder: Path, dashboard: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Write `curves.png` and `report.html` into a run folder, from the files that are in it.

    Needs `metrics.csv`; takes `summary.json`, `environment.json`, `config.yaml`, `plan.json`, `events.jsonl`,
    `samples.jsonl`, `spikes/` and `profile/operators.json` where they are there. Call it again when there are more.

    Args:
        dashboard: Sections of panels, as in `conf/dashboard/default.yaml`; None: every metric, by its prefix.

    Raises FileNotFoundError without `metrics.csv`.
    """
    run = read_run(run_folder)
    sections = sections_for(run.series) if dashboard is None else get_sections(dashboard)
    groups, marks = get_groups(run, sections), get_marks(run.events)
    pictures = [chart for group in groups for chart in group.charts if chart.picture]
    if pictures:
        write_png(run_folder / "curves.png", title=run.name, charts=pictures, marks=marks)
    write_page(run_folder / "report.html", page_html(run, groups, marks))


def page_html(run: RunRecord, groups: Sequence[Group], marks: Sequence[Mark]) -> str:
    """The whole page. Whatever came from a file of the run is escaped."""
    parts = [samples(run), operators(run), evidence(run), plan_table(run)]
    tables = [
        *parts,
        f'<div class="pair">{facts("Summary", run.summary)}{facts("Environment", _where(run))}</div>',
        events(run),
        config_text(run),
    ]
    charts = [chart for group in groups for chart in group.charts]
    places = [(anchor_id(group.title), group.title) for group in groups]
    places += [("evidence", "evidence")] if run.evidence else []
    bar = zoom_bar([*places, ("tables", "tables")]) if charts else ""
    body = (
        f"{head(run)}{typed_words(run)}{diagnosis(run)}{tiles(run)}{bar}{mark_legend(run)}"
        f"{charts_html(groups, marks)}{_left_out(run, groups)}"
        f'<div id="tables">{"".join(tables)}</div>'
        f"<footer>{escape(str(run.folder))}</footer>"
    )
    first, last = padded(charts[0].x_range) if charts else (0, 1)
    data = {
        "first": first,
        "last": last,
        "charts": [chart_data(chart) for chart in charts],
        "marks": [[mark.step, mark.event, mark.undone_to] for mark in marks],
    }
    return whole_page(title=run.name, body=body, data=data, styles=STYLES, scripts=SCRIPTS)


def charts_html(groups: Sequence[Group], marks: Sequence[Mark]) -> str:
    """A heading and a grid without holes for each group."""
    num_curves = sum(len(chart.curves) for group in groups for chart in group.charts)
    buckets = max(40, min(STILL_BUCKETS, STILL_POINTS // (4 * max(1, num_curves))))
    html, index = [], 0
    for number, group in enumerate(groups):
        figures = []
        for chart, span in zip(
            group.charts, spans(len(group.charts), leads=number == 0), strict=True
        ):
            figures.append(chart_html(chart, marks, index=index, span=span, max_buckets=buckets))
            index += 1
        html.append(
            f'<section id="{anchor_id(group.title)}"><h2>{escape(group.title)}</h2>'
            f'<div class="charts{" lead" if number == 0 else ""}">{"".join(figures)}</div></section>'
        )
    return "".join(html)


def mark_legend(run: RunRecord) -> str:
    """Each kind of event with its color and count; a click hides it."""
    events = [str(event["event"]) for event in run.events if is_marked(event)]
    kinds = list(dict.fromkeys(events))  # in the order of their first event
    keys = "".join(
        f'<button type="button" class="event e-{escape(kind)}" data-event="{escape(kind)}" aria-pressed="true">'
        f"{events.count(kind)}"
        f" {escape(_EVENT_WORDS[kind] if kind in _EVENT_WORDS else kind)}</button>"
        for kind in kinds
    )
    # a click on a key sets the class `without-<kind>` on the body
    hide = "".join(
        f".without-{escape(kind)} .plot .e-{escape(kind)} {{ display: none; }}" for kind in kinds
    )
    dotted = '<span class="dotted">steps that a rollback undid</span>' if run.undone else ""
    return f'<style>{hide}</style><p class="legend">{keys}{dotted}</p>' if keys else ""


def _left_out(run: RunRecord, groups: Sequence[Group]) -> str:
    names = not_drawn(run, groups)
    return (
        f'<p class="legend">Not drawn, as no panel of the dashboard names them: {escape(", ".join(names))}</p>'
        if names
        else ""
    )


def _where(run: RunRecord) -> dict[str, Any]:
    """The environment without what stands at the top of the page."""
    return {name: value for name, value in run.environment.items() if name != "overrides"}
