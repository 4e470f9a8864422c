"""Show compared runs as a table, bars and a list of config differences. Escaped HTML, no Lightning."""

import os
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..header import status_class
from ..html import folded, measure_text, quoted_link, table, value_text
from .runs import ComparedRun, sort_key
from .values import (
    METRICS_BY_MEASURE,
    find_best,
    has_best,
    is_higher_better,
    short_names,
)

MAX_PARAMETER_COLUMNS = 8  # further ones appear only in the list of differences
MAX_BARS = 12
_CLOSE = 0.7  # lowest value by the highest: bars from zero would look equal
MAX_LISTED_VALUES = 12
_TITLES = {
    "val_loss": "val loss",
    "best_val_loss": "best val loss",
    "train_loss": "train loss",
    "val_accuracy": "val accuracy",
    "tokens_per_second": "tokens/s",
    "mfu": "MFU",
    "peak_memory_gib": "peak GiB",
    "seconds": "time",
    "skipped_steps": "skipped",
}


def runs_table(runs: Sequence[ComparedRun], page: Path, *, sort: str) -> str:
    """Return one row per run; a click on a heading sorts, and the best value of each column is bold.

    Args:
        runs: Runs, best first.
        page: Path of the page, for relative links to the runs' own pages.
        sort: The measure that the runs are sorted by.
    """
    measures = get_measures(runs, sort)
    parameters = list(runs[0].parameters)[:MAX_PARAMETER_COLUMNS]
    short = short_names(parameters)
    best = {m: _best([v for r in runs if (v := r.values[m]) is not None], m) for m in measures}
    heads = [("run", "asc"), ("status", "asc")]
    first, rest = measures[:1], measures[1:]  # parameters go next to the sorted column
    heads += [_measure_head(m) for m in first]
    heads += [(short[name], "asc") for name in parameters]
    heads += [_measure_head(m) for m in rest]
    sorted_by = 2 if first == [sort] else -1
    line = "".join(
        f'<th data-first="{order}"{_sorted(order) if i == sorted_by else ""}>'
        f'<button type="button">{escape(title)}</button></th>'
        for i, (title, order) in enumerate(heads)
    )
    rows = "".join(
        f'<tr data-run="{i}">{_run_cell(run, i, page)}{_status_cell(run)}'
        + "".join(_value_cell(run.values[m], m, best[m]) for m in first)
        + "".join(_parameter_cell(run.parameters[name]) for name in parameters)
        + "".join(_value_cell(run.values[m], m, best[m]) for m in rest)
        + "</tr>"
        for i, run in enumerate(runs)
    )
    return (
        f'<div class="card runs"><table class="figures"><thead><tr>{line}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def get_measures(runs: Sequence[ComparedRun], sort: str) -> list[str]:
    """Return the measures that any run has, `sort` first; omit those that are 0 in every run."""
    names = list(dict.fromkeys([sort, *METRICS_BY_MEASURE, *runs[0].values]))  # followed by evaluations
    return [name for name in names if any(run.values[name] for run in runs)]


def get_title(measure: str) -> str:
    """Return the column heading of a measure."""
    return _TITLES.get(measure, measure)


def _measure_head(measure: str) -> tuple[str, str]:
    return get_title(measure), "desc" if is_higher_better(measure) else "asc"


def _best(values: list[float], measure: str) -> float | None:
    """Return the value to highlight; None if more than half of the runs have it, or no value counts as better."""
    best = find_best(values, measure)
    is_common = best is not None and 2 * values.count(best) > len(values)
    return None if is_common or not has_best(measure) else best


def _sorted(order: str) -> str:
    return f' aria-sort="{"ascending" if order == "asc" else "descending"}"'


def _run_cell(run: ComparedRun, number: int, page: Path) -> str:
    swatch = (
        f'<button type="button" {run.color.attributes("swatch")} data-toggle="{number}"'
        f' aria-pressed="true" title="show or hide" aria-label="show {escape(run.name)}"></button>'
    )
    report = run.folder / "report.html"
    name = escape(run.name)
    if report.exists():
        link = Path(os.path.relpath(report.resolve(), page.resolve().parent)).as_posix()
        name = f'<a href="{quoted_link(link)}">{name}</a>'
    return f'<td data-v="{escape(run.name)}">{swatch}{name}</td>'


def _status_cell(run: ComparedRun) -> str:
    status = escape(run.status)
    return f'<td data-v="{status}"><span class="{status_class(run.status)}">{status}</span></td>'


def _value_cell(value: float | None, measure: str, best: float | None) -> str:
    if value is None:
        return "<td>&ndash;</td>"
    shown = escape(measure_text(value, measure))
    text = f"<b>{shown}</b>" if value == best else shown
    return f'<td data-v="{value!r}">{text}</td>'


def _parameter_cell(value: Any) -> str:
    if value is None:
        return "<td>&ndash;</td>"
    return f'<td data-v="{escape(str(value))}">{escape(value_text(value))}</td>'


def bars_html(title: str, metric: str, runs: Sequence[ComparedRun]) -> str:
    """Return a bar per run to its best value, best run first: from zero, or from just below the lowest of close values.

    Bars from zero of close values look equal; the caption says where the others start.
    """
    reached = [(value, i) for i, run in enumerate(runs) if (value := run.best.get(metric)) is not None]
    if not reached:
        return ""
    reached.sort(key=lambda pair: sort_key(pair[0], metric))
    sizes = [abs(value) for value, _ in reached]
    longest, start = max(sizes) or 1.0, 0.0
    if _CLOSE * longest <= min(sizes) < longest:
        start = min(sizes) - 0.25 * (longest - min(sizes))
    rows = [_bar(runs[i], i, value, (abs(value) - start) / (longest - start)) for value, i in reached]
    more = rows[MAX_BARS:]
    rest = f"<details><summary>{len(more)} more</summary>{''.join(more)}</details>" if more else ""
    note = f"{metric}, from {value_text(start)}" if start else metric
    caption = f"<figcaption><b>{escape(title)}</b><span class='note'>{escape(note)}</span></figcaption>"
    return f'<figure class="chart bars span6">{caption}{"".join(rows[:MAX_BARS])}{rest}</figure>'


def _bar(run: ComparedRun, number: int, value: float, fraction: float) -> str:
    return (
        f'<div {run.color.attributes("bar-row")} data-run="{number}"><span>{escape(run.name)}</span>'
        f'<i><i style="width:{fraction:.2%}"></i></i><b>{escape(value_text(value))}</b></div>'
    )


def differences_table(runs: Sequence[ComparedRun]) -> str:
    """Return a table of the parameters that differ, with their values and the number of runs that have each."""
    rows = []
    for name in runs[0].parameters:
        counts = Counter(value_text(run.parameters[name]) for run in runs)
        values = " &nbsp; ".join(
            f"<code>{escape(value)}</code>{f' &times; {count}' if count > 1 else ''}"
            for value, count in counts.most_common(MAX_LISTED_VALUES)
        )
        num_more = len(counts) - MAX_LISTED_VALUES
        more = f" &nbsp; and {num_more} more" if num_more > 0 else ""
        rows.append([f"<code>{escape(name)}</code>", f"{values}{more}"])
    if not rows:
        return ""
    content = table(("parameter", "values"), rows, css="list")
    return folded(f"Config differences ({len(rows)})", content, id_="differences")
