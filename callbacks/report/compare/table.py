"""Arrange compared runs in a table, bars and a list of config differences. No Lightning."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..html import measure_text, value_text
from ..run_record import status_class
from .runs import ComparedRun, sort_key
from .values import (
    METRICS_BY_MEASURE,
    Directions,
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


class Cell(NamedTuple):
    """One cell of the runs' table: its text, the value that a click on the heading sorts by, and its look."""

    text: str
    sort_value: str | None
    css: str = ""


class Head(NamedTuple):
    """A heading: its text, the order of the first click on it, and the order that the page has, if by it."""

    text: str
    first_order: str
    sorted_by: str = ""


class RunRow(NamedTuple):
    """A run: its link, relative to the page, or none, and its cells after the name."""

    run: ComparedRun
    link: str | None
    cells: list[Cell]


UNKNOWN = Cell("\N{EN DASH}", None)


def get_table(runs: Sequence[ComparedRun], page: Path, *, sort: str) -> tuple[list[Head], list[RunRow]]:
    """Return the headings and one row per run; the best value of each column is marked.

    Args:
        runs: Runs, best first.
        page: Path of the page, for relative links to the runs' own pages.
        sort: The measure that the runs are sorted by.
    """
    measures = get_measures(runs, sort)
    parameters = list(runs[0].parameters)[:MAX_PARAMETER_COLUMNS]
    short = short_names(parameters)
    declared = runs[0].declared
    ended = [run for run in runs if run.status == "finished"]  # a run that has failed took the least time
    counting = {m: ended if m == "seconds" else runs for m in measures}
    best = {m: _best([v for r in counting[m] if (v := r.values[m]) is not None], m, declared) for m in measures}
    first, rest = measures[:1], measures[1:]  # parameters go next to the sorted column
    heads = [
        Head("run", "asc"),
        Head("status", "asc"),
        *(_measure_head(m, sort, declared) for m in first),
        *(Head(short[name], "asc") for name in parameters),
        *(_measure_head(m, sort, declared) for m in rest),
    ]
    rows = [
        RunRow(
            run,
            get_link(run, page),
            [
                Cell(run.status, run.status, status_class(run.status)),
                *(_value_cell(run.values[m], m, best[m]) for m in first),
                *(_parameter_cell(run.parameters[name]) for name in parameters),
                *(_value_cell(run.values[m], m, best[m]) for m in rest),
            ],
        )
        for run in runs
    ]
    return heads, rows


def get_measures(runs: Sequence[ComparedRun], sort: str) -> list[str]:
    """Return the measures that any run has, `sort` first; omit those that are 0 in every run."""
    names = list(dict.fromkeys([sort, *METRICS_BY_MEASURE, *runs[0].values]))  # followed by evaluations
    return [name for name in names if any(run.values[name] for run in runs)]


def get_title(measure: str) -> str:
    """Return the column heading of a measure."""
    return _TITLES.get(measure, measure)


def _measure_head(measure: str, sort: str, declared: Directions) -> Head:
    order = "desc" if is_higher_better(measure, declared) else "asc"
    is_sorted = {"asc": "ascending", "desc": "descending"}[order] if measure == sort else ""
    return Head(get_title(measure), order, is_sorted)


def _best(values: list[float], measure: str, declared: Directions) -> float | None:
    """Return the value to highlight; None if more than half of the runs have it, or no value counts as better."""
    best = find_best(values, measure, declared)
    is_common = best is not None and 2 * values.count(best) > len(values)
    return None if is_common or not has_best(measure) else best


def get_link(run: ComparedRun, page: Path) -> str | None:
    report = run.folder / "report.html"
    if not report.exists():
        return None
    return Path(os.path.relpath(report.resolve(), page.resolve().parent)).as_posix()


def _value_cell(value: float | None, measure: str, best: float | None) -> Cell:
    if value is None:
        return UNKNOWN
    return Cell(measure_text(value, measure), repr(value), "best" if value == best else "")


def _parameter_cell(value: Any) -> Cell:
    return UNKNOWN if value is None else Cell(value_text(value), str(value))


class Bar(NamedTuple):
    """A run's best value and the length of its bar, from 0 to 1."""

    number: int
    run: ComparedRun
    text: str
    fraction: float


class Bars(NamedTuple):
    """A panel of bars; the note says of what they are, and where they start if not from zero."""

    title: str
    note: str
    rows: list[Bar]
    more: list[Bar]


def get_bars(title: str, metric: str, runs: Sequence[ComparedRun]) -> Bars | None:
    """Return a bar per run to its best value, best run first: from zero, or from just below the lowest of close values.

    Bars from zero of close values look equal. None if no run has the metric.
    """
    reached = [(value, i) for i, run in enumerate(runs) if (value := run.best.get(metric)) is not None]
    if not reached:
        return None
    reached.sort(key=lambda pair: sort_key(pair[0], metric, runs[0].declared))
    sizes = [abs(value) for value, _ in reached]
    longest, start = max(sizes) or 1.0, 0.0
    if _CLOSE * longest <= min(sizes) < longest:
        start = min(sizes) - 0.25 * (longest - min(sizes))
    rows = [Bar(i, runs[i], value_text(value), (abs(value) - start) / (longest - start)) for value, i in reached]
    note = f"{metric}, from {value_text(start)}" if start else metric
    return Bars(title, note, rows[:MAX_BARS], rows[MAX_BARS:])


def get_differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[tuple[str, int]], int]]:
    """Return the parameters that differ, their most frequent values with the number of runs, and how many more."""
    rows = []
    for name in runs[0].parameters:
        counts = Counter(value_text(run.parameters[name]) for run in runs)
        rows.append((name, counts.most_common(MAX_LISTED_VALUES), max(0, len(counts) - MAX_LISTED_VALUES)))
    return rows
