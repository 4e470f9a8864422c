"""Write a self-contained page that compares runs: table, parameters, bars, overlaid curves. No Lightning."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..charts.figures import Figure, column_spans, packed, padded_range
from ..charts.series import step_range, value_range
from ..dashboard import Panel, Section, get_sections, sections_for
from ..html import anchor_id, measure_text, render, value_text, write_page
from ..run_record import metric_names
from .parallel import parallel_figure
from .runs import ComparedRun, common_parent, in_natural_order, read_runs
from .table import Bars, get_bars, get_differences, get_table, get_title
from .values import short_names

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
    """Return the complete HTML page."""
    drawn = [(section.title, _section_figures(section, runs, leads=i == 0)) for i, section in enumerate(sections)]
    drawn = [(title, figures) for title, figures in drawn if figures]
    figures = [figure for _, figures in drawn for figure in figures]
    steps = [step for figure in figures for step in figure.data.pop("range")]
    first, last = padded_range(step_range(steps)) if steps else (0, 1)
    across = [] if len(runs) == 1 else list(_across_runs(sections, runs, sort))
    short = short_names(list(runs[0].parameters))
    heads, rows = get_table(runs, path, sort=sort)
    return render(
        "comparison.jinja",
        figures=[*figures, *(panel for panel in across if isinstance(panel, Figure))],
        page={
            "first": first,
            "last": last,
            "marks": [],
            "runs": [{"color": run.color.key, "text": _describe(run, sort, short)} for run in runs],
        },
        title="1 run" if len(runs) == 1 else f"{len(runs)} runs",
        runs=runs,
        statuses=Counter(run.status for run in runs).most_common(),
        named=list(short.values())[:MAX_NAMED_PARAMETERS],
        num_more=max(0, len(short) - MAX_NAMED_PARAMETERS),
        links=[("runs", "runs"), *((anchor_id(title), title) for title, _ in drawn)],
        heads=heads,
        rows=rows,
        across=across,
        groups=drawn,
        shown=[("all", len(runs)), *([("best 10", 10)] if len(runs) > 10 else []), ("none", 0)],
        differences=get_differences(runs),
        folder=common_parent([run.folder for run in runs]),
    )


def _across_runs(sections: Sequence[Section], runs: Sequence[ComparedRun], sort: str) -> Iterator[Bars | Figure]:
    """Yield the bar and parallel panels."""
    written = list(dict.fromkeys(name for run in runs for name in run.best))
    for panel in (panel for section in sections for panel in section.panels):
        if panel.kind == "bar":
            yield from filter(None, (get_bars(panel.title, name, runs) for name in panel.metrics_among(written)))
        if panel.kind == "parallel" and runs[0].parameters:
            yield parallel_figure(panel.title, sort, panel.parameters, runs)


def _section_figures(section: Section, runs: Sequence[ComparedRun], *, leads: bool) -> list[Figure]:
    """Return one figure per metric of a section, with the curves of all runs that have it."""
    written = list(dict.fromkeys(name for run in runs for name in run.curves))
    drawn = [(panel, name) for panel in section.panels if panel.kind == "line" for name in panel.metrics_among(written)]
    figures = []
    for (panel, name), span in zip(drawn, column_spans(len(drawn), leads=leads), strict=True):
        # two figures of one panel are distinguished by their metrics
        title, also = panel.title, name
        if sum(other is panel for other, _ in drawn) > 1:
            title, also = name, panel.title
        data = _chart_data(panel, title, name, runs)
        notes = [also, "log scale"] if data["log"] else [also]
        figures.append(Figure(title, data, notes=notes, span=span, has_table=False))
    return figures


def _chart_data(panel: Panel, title: str, metric: str, runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return the points of a metric for all runs that have it, and their first and last step."""
    curves = [(i, run, run.curves[metric]) for i, run in enumerate(runs) if metric in run.curves]
    values = [value for _, _, points in curves for _, value in points if math.isfinite(value)]
    steps = [step for _, _, points in curves for step, _ in points]
    return {
        "kind": "steps",
        "title": title,
        "log": value_range(values, may_be_log=panel.log_scale)[1],
        "curves": [{"run": i, "name": run.name, "color": run.color.key, **packed(points)} for i, run, points in curves],
        "range": (min(steps), max(steps)),
    }


def _describe(run: ComparedRun, sort: str, short: Mapping[str, str]) -> str:
    """Return a run in one line."""
    value = run.values[sort]
    parameters = [f"{short[name]} {value_text(v)}" for name, v in run.parameters.items() if v is not None]
    result = f"{get_title(sort)} {'unknown' if value is None else measure_text(value, sort)}"
    return " · ".join([run.name, result, *parameters[:MAX_NAMED_PARAMETERS]])
