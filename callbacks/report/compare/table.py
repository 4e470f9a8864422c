"""The runs of a comparison as a table, as bars and as a list of differences. Escaped HTML, no Lightning."""

import os
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...progress.text import clock_text
from ..header import status_class
from ..html import folded, table, words
from .runs import ComparedRun, sort_key
from .values import (
    METRICS_OF,
    find_best,
    has_best,
    is_better_when_more,
    short_names,
)

MAX_COLUMNS = 8  # of parameters; the others are in the list of differences
MAX_BARS = 12
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
    """A row a run, best first; each heading sorts. What is best of a column is marked."""
    measures = get_measures(runs, sort)
    parameters = list(runs[0].parameters)[:MAX_COLUMNS]
    short = short_names(parameters)
    best = {m: _best([v for r in runs if (v := r.values[m]) is not None], m) for m in measures}
    heads = [("run", "asc"), ("status", "asc")]
    first, rest = measures[:1], measures[1:]  # the parameters beside what is sorted by
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
    """What at least one run has, what is sorted by first; no column of zeros."""
    names = list(dict.fromkeys([sort, *METRICS_OF]))
    return [name for name in names if any(run.values[name] for run in runs)]


def get_title(measure: str) -> str:
    """As a heading."""
    return _TITLES[measure] if measure in _TITLES else measure


def _measure_head(measure: str) -> tuple[str, str]:
    return get_title(measure), "desc" if is_better_when_more(measure) else "asc"


def _best(values: list[float], measure: str) -> float | None:
    """What is marked: nothing where half the runs have it, or where no value is better than another."""
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
        name = f'<a href="{escape(link)}">{name}</a>'
    return f'<td data-v="{escape(run.name)}">{swatch}{name}</td>'


def _status_cell(run: ComparedRun) -> str:
    status = escape(run.status)
    return f'<td data-v="{status}"><span class="{status_class(run.status)}">{status}</span></td>'


def _value_cell(value: float | None, measure: str, best: float | None) -> str:
    if value is None:
        return "<td>&ndash;</td>"
    shown = escape(shown_value(value, measure))
    text = f"<b>{shown}</b>" if value == best else shown
    return f'<td data-v="{value!r}">{text}</td>'


def shown_value(value: float, measure: str) -> str:
    """A figure of the table."""
    if measure == "seconds":
        return clock_text(value)
    if measure == "mfu":
        return f"{value:.1%}"
    return f"{value:.3g}" if measure == "peak_memory_gib" else words(value)


def _parameter_cell(value: Any) -> str:
    if value is None:
        return "<td>&ndash;</td>"
    return f'<td data-v="{escape(str(value))}">{escape(words(value))}</td>'


def bars_html(title: str, metric: str, runs: Sequence[ComparedRun]) -> str:
    """The best value that each run has reached, from zero; the best run first."""
    reached = [
        (value, i) for i, run in enumerate(runs) if (value := run.best.get(metric)) is not None
    ]
    if not reached:
        return ""
    reached.sort(key=lambda pair: sort_key(pair[0], metric))
    longest = max(abs(value) for value, _ in reached) or 1.0
    rows = [_bar(runs[i], i, value, abs(value) / longest) for value, i in reached]
    more = rows[MAX_BARS:]
    rest = f"<details><summary>{len(more)} more</summary>{''.join(more)}</details>" if more else ""
    caption = (
        f"<figcaption><b>{escape(title)}</b><span class='note'>{escape(metric)}</span></figcaption>"
    )
    return f'<figure class="chart bars span6">{caption}{"".join(rows[:MAX_BARS])}{rest}</figure>'


def _bar(run: ComparedRun, number: int, value: float, share: float) -> str:
    return (
        f'<div {run.color.attributes("bar-row")} data-run="{number}"><span>{escape(run.name)}</span>'
        f'<i><i style="width:{share:.2%}"></i></i><b>{escape(words(value))}</b></div>'
    )


def differences(runs: Sequence[ComparedRun]) -> str:
    """Each parameter that differs, with its values and how many runs have them."""
    rows = []
    for name in runs[0].parameters:
        counts = Counter(words(run.parameters[name]) for run in runs)
        values = " &nbsp; ".join(
            f"<code>{escape(value)}</code>{f' &times; {count}' if count > 1 else ''}"
            for value, count in counts.most_common(12)
        )
        more = f" &nbsp; and {len(counts) - 12} more" if len(counts) > 12 else ""
        rows.append([f"<code>{escape(name)}</code>", f"{values}{more}"])
    if not rows:
        return ""
    content = table(("parameter", "values"), rows).replace('class="figures"', 'class="list"')
    return folded(f"What the configs differ in ({len(rows)})", content, id_="differences")
