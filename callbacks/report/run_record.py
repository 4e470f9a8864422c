"""Read the files of a run folder as plain values, each file once. No Lightning."""

import csv
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import yaml

from ..diagnosis.read import is_bounded, parse_yaml, read_lines, read_object, read_text
from ..diagnosis.run import STATUS_OF_EVENT
from ..files import describe

log = logging.getLogger("lightning_recipes")
Point = tuple[int, float]  # step, value
Series = dict[str, list[Point]]  # by metric name, in file order
Kind = TypeVar("Kind", dict[str, Any], list[Any])

_STATUS_CLASSES = {"finished": "good"} | dict.fromkeys(
    ("preempted", "stopped", "interrupted", "running", "unknown"), "warn"
)


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run folder's files; a missing or incomplete file is empty.

    Attributes:
        series: The points of every metric.
        plan: Content of `plan.json`, the estimates made before the run started.
        operators: The operators of a profile.
        spikes: Content of each spike dump's `spike.json`, with its `folder`.
        rolled_back: The points that each rollback discarded.
        title: Name of the run; empty: that in the config, else the folder's.
        damaged: A sentence for each file that could not be read, or for the part of it.
    """

    folder: Path
    series: Series
    events: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    completions: list[dict[str, Any]]
    classes: list[dict[str, Any]]
    retrieved: list[dict[str, Any]]
    summary: dict[str, Any]
    environment: dict[str, Any]
    config_text: str
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    operators: list[dict[str, Any]] = field(default_factory=list)
    spikes: list[dict[str, Any]] = field(default_factory=list)
    rolled_back: list[Series] = field(default_factory=list)
    title: str = ""
    damaged: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its title, else the name in the config, else the folder's name."""
        if self.title:
            return self.title
        found = re.search(r"^name:\s*(\S.*?)\s*$", self.config_text, flags=re.MULTILINE)
        return found.group(1).strip("'\"") if found else self.folder.name

    @property
    def overrides(self) -> list[str]:
        """Command-line overrides of the run."""
        overrides = self.environment.get("overrides", [])
        return list(map(str, overrides)) if isinstance(overrides, list) else []

    @property
    def last_step(self) -> int | None:
        """Last step of any metric; None if nothing was logged."""
        return max((points[-1][0] for points in self.series.values()), default=None)

    def last(self, metric: str) -> float | None:
        """Return the metric's last value; None if it was never logged."""
        points = self.series.get(metric)
        return points[-1][1] if points else None


@dataclass(frozen=True, kw_only=True)
class RecordedFit:
    """What `RunReport` has seen of a fit, for a folder without the files of these recipes.

    Attributes:
        title: Name of the run.
        rows: Metrics by optimizer step.
        rolled_back: For each rollback, the rows that it discarded.
        events: Events of the callbacks, as in `events.jsonl`.
        summary: How it ended, as in `summary.json`.
        environment: Devices and versions, as in `environment.json`.
        hyperparameters: Those that the module has saved.
    """

    title: str
    rows: Mapping[int, Mapping[str, float]]
    rolled_back: Sequence[Mapping[int, Mapping[str, float]]]
    events: list[dict[str, Any]]
    summary: dict[str, Any]
    environment: dict[str, Any]
    hyperparameters: dict[str, Any]


def add_fit(run: RunRecord, fit: RecordedFit) -> RunRecord:
    """Return a run with what was recorded of a fit in place of what is in its folder."""
    config = run.config or fit.hyperparameters
    return replace(
        run,
        title=fit.title,
        series=as_series(fit.rows),
        rolled_back=[as_series(rows) for rows in fit.rolled_back],
        events=fit.events,
        summary=fit.summary,
        environment=fit.environment,
        config=config,
        config_text=run.config_text or (yaml.safe_dump(config, sort_keys=False) if config else ""),
    )


def is_finite(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number, which a float can hold; bools do not count."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def get_status(run: RunRecord) -> str | None:
    """Return the status from the summary, else from the last event; None if there is neither."""
    if "status" in run.summary:
        return str(run.summary["status"])
    if not run.events:
        return None
    return STATUS_OF_EVENT.get(str(run.events[-1].get("event")), "running")


def status_class(status: str) -> str:
    """Return the style class of a status: `good`, `warn`, or `bad` for any other."""
    return _STATUS_CLASSES.get(status, "bad")


def read_run(folder: Path, *, needs_metrics: bool = True) -> RunRecord:
    """Read `metrics.csv` and every other file of a run that exists.

    Args:
        folder: The run folder.
        needs_metrics: Whether a missing or invalid `metrics.csv` raises; a run that has just started has none.

    Raises:
        FileNotFoundError: There is no `metrics.csv`.
        ValueError: `metrics.csv` has no `step` column, or is no table.
    """
    metrics, damaged = folder / "metrics.csv", list[str]()
    operators = _read_json(folder / "profile" / "operators.json", list, damaged)
    text = read_text(folder / "config.yaml") or read_text(folder / "hparams.yaml")
    return RunRecord(
        folder=folder.resolve(),
        series=read_metrics(metrics) if needs_metrics else _read_metrics_if_any(metrics),
        events=read_lines(folder / "events.jsonl"),
        samples=read_lines(folder / "samples.jsonl"),
        answers=read_lines(folder / "answers.jsonl"),
        completions=read_lines(folder / "completions.jsonl"),
        classes=_read_splits(folder, "classes", damaged),
        retrieved=_read_splits(folder, "retrieval", damaged),
        summary=_read_json(folder / "summary.json", dict, damaged),
        environment=_read_json(folder / "environment.json", dict, damaged),
        config_text=text,
        config=parse_yaml(text),
        plan=_read_json(folder / "plan.json", dict, damaged),
        operators=[item for item in operators if isinstance(item, dict)],
        spikes=[
            {**read_object(path), "folder": str(path.parent.relative_to(folder))}
            for path in sorted(folder.glob("spikes/step_*/spike.json"))
        ],
        rolled_back=[_read_metrics_if_any(path) for path in sorted(folder.glob("rolled_back/*.csv"))],
        damaged=damaged,
    )


def _read_splits(folder: Path, name: str, damaged: list[str]) -> list[dict[str, Any]]:
    """Return the records of all splits, with the name of the split, of val before train and test."""
    return [
        {**_read_json(path, dict, damaged), "split": path.stem.removeprefix(f"{name}_")}
        for path in sorted(folder.glob(f"{name}_*.json"), reverse=True)
    ]


def _read_json(path: Path, kind: type[Kind], damaged: list[str]) -> Kind:
    """Return what a JSON file holds; empty if there is no file, or none of this kind, which is added to `damaged`."""
    try:
        text = read_text(path)
        value = json.loads(text) if path.exists() else kind()
    except OSError as error:
        reason = describe(error)
    except (ValueError, RecursionError) as error:
        reason = str(error)
    else:
        if isinstance(value, kind) and is_bounded(value):
            return value
        reason = f"it holds no JSON {'object' if kind is dict else 'list'} of a usual size"
    damaged.append(f"{path.name} could not be read: {reason}")
    return kind()


def read_metrics(path: Path) -> Series:
    """Read each column's non-empty cells with their steps; skip truncated rows and those without a step.

    A kill leaves one truncated row; a log line counts more of them.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: There is no `step` column, or the file is not a table.
    """
    if path.exists() and not path.is_file():  # a FIFO would block
        raise ValueError(f"{path} is not a file")
    num_rows = num_skipped = 0
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.reader(file)
        try:
            header = next(rows, [])
            if "step" not in header:
                found = "is empty" if not header else f"has no column 'step' in its header {str(header)[:60]}"
                found = "is not a text file" if any("\0" in name for name in header) else found
                raise ValueError(f"{path} {found}")
            step_column = header.index("step")
            columns = [(i, name) for i, name in enumerate(header) if i != step_column]
            series: Series = {name: [] for _, name in columns}
            for num_rows, row in enumerate(rows, start=1):  # noqa: B007  counts them
                if len(row) != len(header) or not math.isfinite(place := _parse_number(row[step_column])):
                    num_skipped += 1
                    continue
                step = int(place)
                for i, name in columns:
                    if row[i] != "":
                        series[name].append((step, _parse_number(row[i])))
        except csv.Error as error:
            raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
    if num_skipped > 1:
        log.warning(f"{path}: {num_skipped:,} of its {num_rows:,} rows are cut or have no step, and are not drawn")
    return {name: points for name, points in series.items() if points}


def as_series(rows: Mapping[int, Mapping[str, float]]) -> Series:
    """Convert rows by step to the points of every metric."""
    series: Series = {}
    for step in sorted(rows):
        for name, value in rows[step].items():
            series.setdefault(name, []).append((step, value))
    return series


def metric_names(path: Path) -> list[str]:
    """Return the column names of a metrics file without reading its rows; empty if it does not exist."""
    if not path.is_file():
        return []
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            return [name for name in next(csv.reader(file), []) if name != "step"]
    except (OSError, csv.Error):  # `read_run` says so
        return []


def _read_metrics_if_any(path: Path) -> Series:
    """Return the series of a metrics file; without one, or with one that is no table, which a log line names, none."""
    try:
        return read_metrics(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning(f"Curves are missing: {error}")
        return {}


def _parse_number(cell: str) -> float:
    """Return a cell as a number; NaN for text."""
    try:
        return float(cell)
    except ValueError:
        return math.nan
