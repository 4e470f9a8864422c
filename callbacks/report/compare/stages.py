"""Write a self-contained page of the stages of a pipeline: a row each, and their curves one after another."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..charts.figures import padded_range
from ..charts.series import step_range
from ..dashboard import Section, get_sections
from ..html import anchor_id, measure_text, render, write_page
from ..run_record import RunRecord, is_finite, status_class
from .page import section_figures
from .runs import ComparedRun, get_color, read_thin
from .table import UNKNOWN, Cell, Head, RunRow, get_link
from .values import get_evaluations, get_value

_FIRST = ("val/loss", "val/exact_match", "val/reward")  # of validation; others follow, as many as fit
_MAX_OTHERS = 8
_TITLES = {"seconds": "time", "train_loss": "train loss", "val/loss": "val loss", "val/exact_match": "exact match"}


def write_stages(
    title: str,
    stages: Mapping[str, Mapping[str, Any]],
    path: Path | str,
    *,
    dashboard: Sequence[Mapping[str, Any]],
) -> None:
    """Write a page of the stages of a pipeline, whether they have finished or not.

    Args:
        title: Name of the pipeline.
        stages: By name, in order: `folder`, `state`, `seconds` and `overrides` of each that was started.
        path: The HTML file to write; folders of stages are relative to its own.
        dashboard: Sections of panels, as in `conf/dashboard/default.yaml`.

    Raises:
        ValueError: No stage was started.
    """
    if not stages:
        raise ValueError("no stage was started, so there is nothing to show")
    path, sections = Path(path), get_sections(dashboard)
    folders = [path.parent / stage["folder"] for stage in stages.values()]
    records = read_thin(folders, [panel for section in sections for panel in section.panels])
    runs = [
        ComparedRun(
            name=name,
            folder=record.folder,
            status=str(stage["state"]),
            color=get_color(number, 0.0, len(stages)),
            values={},
            best={},
            curves=curves,
        )
        for number, ((name, stage), record, curves) in enumerate(
            zip(stages.items(), records, _one_after_another(records), strict=True)
        )
    ]
    write_page(path, _page_html(title, runs, list(stages.values()), records, sections, path))


def _one_after_another(records: Sequence[RunRecord]) -> Iterator[dict[str, list[tuple[int, float]]]]:
    """Yield the curves of each stage, whose steps follow those of the stages before."""
    done = 0
    for record in records:
        yield {name: [(done + step, value) for step, value in points] for name, points in record.series.items()}
        done += record.last_step or 0


def _page_html(
    title: str,
    runs: Sequence[ComparedRun],
    stages: Sequence[Mapping[str, Any]],
    records: Sequence[RunRecord],
    sections: Sequence[Section],
    path: Path,
) -> str:
    drawn = [(section.title, section_figures(section, runs, leads=i == 0)) for i, section in enumerate(sections)]
    drawn = [(title, figures) for title, figures in drawn if figures]
    figures = [figure for _, figures in drawn for figure in figures]
    steps = [step for figure in figures for step in figure.data.pop("range")]
    first, last = padded_range(step_range(steps)) if steps else (0, 1)
    heads, rows = _get_table(runs, stages, records, path)
    return render(
        "comparison.jinja",
        figures=figures,
        page={
            "first": first,
            "last": last,
            "marks": [],
            "runs": [{"color": run.color.key, "text": run.name} for run in runs],
        },
        title=f"Pipeline {title}",
        note="the steps of each stage follow those of the one before",
        runs=runs,
        named=(),
        num_more=0,
        across=(),
        differences=(),
        statuses=Counter(run.status for run in runs).most_common(),
        links=[("runs", "stages"), *((anchor_id(title), title) for title, _ in drawn)],
        heads=heads,
        rows=rows,
        groups=drawn,
        shown=[("all", len(runs)), ("none", 0)],
        folder=path.resolve().parent,
    )


def _get_table(
    runs: Sequence[ComparedRun], stages: Sequence[Mapping[str, Any]], records: Sequence[RunRecord], page: Path
) -> tuple[list[Head], list[RunRow]]:
    validated = [_get_validation(record) for record in records]
    names = list(dict.fromkeys(name for values in validated for name in values))
    others = [name for name in names if name not in _FIRST][:_MAX_OTHERS]
    of_val = [name for name in _FIRST if name in names] + others
    measures = ["steps", "samples", "tokens", "seconds", "train_loss"]
    found = [
        {measure: get_value(record, measure) for measure in measures} | values
        for record, values in zip(records, validated, strict=True)
    ]
    for values, stage in zip(found, stages, strict=True):
        values["seconds"] = values["seconds"] if values["seconds"] is not None else stage["seconds"]
    shown = [name for name in [*measures, *of_val] if any(values.get(name) is not None for values in found)]
    heads = [Head(title, "asc") for title in ("stage", "recipe", "status")]
    heads += [Head(_TITLES.get(name, name.removeprefix("val/")), "asc") for name in shown]
    rows = []
    for run, stage, values in zip(runs, stages, found, strict=True):
        kind = _describe(stage["overrides"])
        cells = [Cell(kind, kind), Cell(run.status, run.status, status_class(run.status))]
        rows.append(RunRow(run, get_link(run, page), [*cells, *(_cell(name, values.get(name)) for name in shown)]))
    return heads, rows


def _describe(overrides: Sequence[str]) -> str:
    """Return what a stage is: its mode if it trains nothing, else its recipe."""
    chosen = {key: value for key, _, value in (text.partition("=") for text in overrides)}
    return f"mode={chosen['mode']}" if chosen.get("mode", "fit") != "fit" else chosen.get("recipe", "quickstart")


def _get_validation(record: RunRecord) -> dict[str, float | None]:
    """Return the last values of validation by name, with those of an evaluation, which reads a whole split."""
    values: dict[str, float | None] = {
        name: record.last(name) for name in record.series if name.startswith("val/") and name.count("/") < 3
    }
    for name, value in get_evaluations(record).items():
        values[f"val/{name.removeprefix('evaluate_val/')}" if name.startswith("evaluate_val/") else name] = value
    return {name: value for name, value in values.items() if is_finite(value)}


def _cell(name: str, value: float | None) -> Cell:
    if value is None:
        return UNKNOWN
    return Cell(measure_text(value, name), repr(value))
