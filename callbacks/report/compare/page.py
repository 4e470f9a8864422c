"""Write a self-contained page that compares runs: table, parameters, bars, overlaid curves. No Lightning."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from ..charts.figures import Axis, Figure, column_spans, packed, padded_range
from ..charts.series import linear_ticks, log_ticks, step_range, tick_labels, value_range
from ..dashboard import Panel, Section, get_sections, sections_for
from ..html import anchor_id, measure_text, render, value_text, write_page
from ..run_record import is_finite, metric_names
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
    drawn = [(section.title, section_figures(section, runs, leads=i == 0)) for i, section in enumerate(sections)]
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
        note="",
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


def section_figures(section: Section, runs: Sequence[ComparedRun], *, leads: bool) -> list[Figure]:
    """Return one figure per metric of a section, with the curves of all runs that have it."""
    drawn = [
        (panel, name, [name in names for names in of_runs])
        for panel in section.panels
        if panel.kind == "line"
        for of_runs in [[panel.metrics_among(run.curves) for run in runs]]
        for name in dict.fromkeys(chain.from_iterable(of_runs))
    ]
    figures = []
    for (panel, name, having), span in zip(drawn, column_spans(len(drawn), leads=leads), strict=True):
        # two figures of one panel are distinguished by their metrics
        title, also = panel.title, name
        if sum(other is panel for other, *_ in drawn) > 1:
            title, also = name, panel.title
        data = _chart_data(panel, title, name, runs, having)
        notes = [also, "log scale"] if data["log"] else [also]
        figures.append(Figure(title, data, notes=notes, span=span, has_table=False))
    return figures


def _chart_data(
    panel: Panel, title: str, metric: str, runs: Sequence[ComparedRun], having: Sequence[bool]
) -> dict[str, Any]:
    """Return the points of a metric for the runs of which it is drawn, and their first and last step."""
    curves = [(i, run, run.curves[metric]) for i, run in enumerate(runs) if having[i]]
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


# Place runs in a parallel coordinates plot: one line each, through its parameters to a metric. No Lightning.

MAX_AXES = 9  # including the metric's
LOG_RATIO = 20.0
MAX_LABELED_VALUES = 7  # with more distinct numbers, an axis has round ticks instead
MAX_LABELED_TEXTS = 21  # with more distinct texts, an axis has no labels
MIN_LABEL_DISTANCE = 0.06  # of the axis; closer labels would overlap
_FOOT = 0.16  # lowest position of values on an axis where some runs have none


def get_axis(title: str, values: Sequence[Any]) -> Axis:
    """Return the axis of one parameter.

    Numbers are placed by value, on a log scale if they span a factor of 20; other values evenly, in order of first
    appearance. Runs without a value are placed at the bottom, below all others.

    Args:
        title: Name of the parameter.
        values: Its value in each run; None if the run has none.
    """
    known = [value for value in values if value is not None]
    if all(is_finite(value) for value in known) and len(set(known)) > 1:
        axis = _number_axis(title, [float(value) for value in known])
    else:
        axis = _text_axis(title, list(map(value_text, known)))
    if len(known) == len(values):
        return axis
    raised = iter([_raise(position) for position in axis.positions])
    positions = [0.0 if value is None else next(raised) for value in values]
    ticks = [(0.0, "none"), *((_raise(position), label) for position, label in axis.ticks)]
    return Axis(axis.title, positions, ticks)


def _raise(position: float) -> float:
    return _FOOT + (1 - _FOOT) * position


def _text_axis(title: str, values: list[str]) -> Axis:
    distinct = list(dict.fromkeys(values))
    last = len(distinct) - 1
    position = {text: i / last if last > 0 else 0.5 for i, text in enumerate(distinct)}
    labeled = distinct if len(distinct) <= MAX_LABELED_TEXTS else []
    ticks = [(position[text], text) for text in labeled]
    return Axis(title, [position[text] for text in values], ticks)


def _number_axis(title: str, values: list[float]) -> Axis:
    low, high = min(values), max(values)
    is_log = low > 0 and high / low >= LOG_RATIO

    def position(value: float) -> float:
        if is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    distinct = sorted(set(values))
    if len(distinct) <= MAX_LABELED_VALUES:
        labeled = distinct[:1] + [
            value for before, value in pairwise(distinct) if position(value) - position(before) > MIN_LABEL_DISTANCE
        ]
    else:
        inner = log_ticks(low, high) if is_log else linear_ticks(low, high)
        labeled = inner if len(inner) > 1 else [low, high]
    ticks = list(zip(map(position, labeled), tick_labels(labeled), strict=True))
    return Axis(f"{title} (log)" if is_log else title, [position(value) for value in values], ticks)


def get_axes(runs: Sequence[ComparedRun], metric: str, parameters: Sequence[str]) -> list[Axis]:
    """Return the axes of the given `parameters` that differ, then of other differing ones, then of the metric."""
    differing = list(runs[0].parameters)
    chosen = [name for name in [*parameters, *differing] if name in differing]
    chosen = list(dict.fromkeys(chosen))[: MAX_AXES - 1]
    short = short_names(chosen)
    axes = [get_axis(short[name], [run.parameters[name] for run in runs]) for name in chosen]
    return [*axes, get_axis(get_title(metric), [run.values[metric] for run in runs])]


def parallel_figure(title: str, metric: str, parameters: Sequence[str], runs: Sequence[ComparedRun]) -> Figure:
    """Return a figure whose data is a line per run, and the axes through which they go.

    Args:
        title: Plain text.
        metric: Metric on the last axis.
        parameters: Config keys whose axes come first.
        runs: All runs, best first; runs without a config are not drawn.
    """
    drawn = [
        (number, run) for number, run in enumerate(runs) if any(value is not None for value in run.parameters.values())
    ]
    axes = get_axes([run for _, run in drawn], metric, parameters)
    lines = zip(*([round(position, 4) for position in axis.positions] for axis in axes), strict=True)
    curves = [
        {"run": number, "name": run.name, "color": run.color.key, "values": line}
        for (number, run), line in zip(drawn, lines, strict=True)
    ]
    data = {"kind": "parallel", "title": title, "log": False, "curves": curves}
    return Figure(title, data, has_table=False, axes=axes)
