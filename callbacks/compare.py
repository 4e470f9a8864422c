"""Several runs as one page that compares them: a fraction of a second a run, no Lightning."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from callbacks.compare_page import page_html
from callbacks.compare_runs import in_order, read_runs
from callbacks.dashboard import Panel, Section, sections_for, sections_of
from callbacks.report_shell import write_page
from callbacks.run_record import metric_names


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
    sections = _sections(folders, sort) if dashboard is None else sections_of(dashboard)
    runs = read_runs(in_order(folders), sections, sort=sort)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(path, page_html(runs, sections, path, sort=sort))


def _sections(folders: Sequence[Path], sort: str) -> list[Section]:
    """For runs that come without a dashboard: their metrics by prefix, and their parameters."""
    names = [name for folder in folders for name in metric_names(folder / "metrics.csv")]
    panel = Panel(title="what the runs differ in", metrics=(sort,), kind="parallel")
    return [*sections_for(dict.fromkeys(names)), Section(title="sweep comparison", panels=(panel,))]
