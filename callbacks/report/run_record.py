"""What a run left in its folder, as plain values: one pass over each file, no Lightning."""

import csv
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Point = tuple[int, float]  # step, value
Series = dict[str, list[Point]]  # by metric name, in the order of the file

_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was built
_STATUS_OF_EVENT = {"end": "finished", "stop": "stopped", "preempted": "preempted"}


@dataclass(frozen=True)
class RunRecord:
    """The files of a run folder. A file that is not there, or not yet whole, is empty here."""

    folder: Path
    series: Series
    events: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    summary: dict[str, Any]
    environment: dict[str, Any]
    config_text: str
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    operators: list[dict[str, Any]] = field(default_factory=list)
    evidence: list[dict[str, Any]] = field(
        default_factory=list
    )  # of spikes, each with its `folder`
    undone: list[Series] = field(default_factory=list)  # the rows that each rollback took back

    @property
    def name(self) -> str:
        """`name:` of the config, else the folder's name."""
        found = re.search(r"^name:\s*(\S.*?)\s*$", self.config_text, flags=re.MULTILINE)
        return found.group(1).strip("'\"") if found else self.folder.name

    @property
    def overrides(self) -> list[str]:
        """What was typed."""
        typed = self.environment["overrides"] if "overrides" in self.environment else []
        return [str(word) for word in typed] if isinstance(typed, list) else []

    def last(self, metric: str) -> float | None:
        """The metric's last value; None if it was never logged."""
        points = self.series.get(metric)
        return points[-1][1] if points else None

    @property
    def last_step(self) -> int | None:
        return max((points[-1][0] for points in self.series.values()), default=None)


def how_it_ended(run: RunRecord) -> str | None:
    """The summary's status; before there is one, what the last event says; None if nothing does."""
    if "status" in run.summary:
        return str(run.summary["status"])
    if not run.events:
        return None
    last = str(run.events[-1].get("event"))
    return _STATUS_OF_EVENT[last] if last in _STATUS_OF_EVENT else "running"


def read_run(folder: Path, *, needs_metrics: bool = True) -> RunRecord:
    """Read `metrics.csv` and what else there is.

    Raises FileNotFoundError without `metrics.csv`, ValueError if its header has no `step`; neither where it is not
    needed, as of a run that has only begun.
    """
    metrics = folder / "metrics.csv"
    text = _read_text(folder / "config.yaml") or _read_text(folder / "hparams.yaml")
    return RunRecord(
        folder=folder.resolve(),
        series=read_metrics(metrics) if needs_metrics else _metrics_so_far(metrics),
        events=_read_lines(folder / "events.jsonl"),
        samples=_read_lines(folder / "samples.jsonl"),
        summary=_read_object(folder / "summary.json"),
        environment=_read_object(folder / "environment.json"),
        config_text=text,
        config=_parsed(text),
        plan=_read_object(folder / "plan.json"),
        operators=_read_list(folder / "profile" / "operators.json"),
        evidence=[
            {**_read_object(path), "folder": str(path.parent.relative_to(folder))}
            for path in sorted(folder.glob("spikes/step_*/spike.json"))
        ],
        undone=[_metrics_so_far(path) for path in sorted(folder.glob("rolled_back/*.csv"))],
    )


def read_metrics(path: Path) -> Series:
    """Each column's filled cells with their steps; a row cut off in mid-write is left out."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        if "step" not in header:
            raise ValueError(f"{path}: the header {header} has no column 'step'")
        at = header.index("step")
        columns = [(i, name) for i, name in enumerate(header) if i != at]
        series: Series = {name: [] for _, name in columns}
        for row in rows:
            if len(row) != len(header):
                continue
            step = int(float(row[at]))
            for i, name in columns:
                if row[i] != "":
                    series[name].append((step, _number(row[i])))
    return {name: points for name, points in series.items() if points}


def _metrics_so_far(path: Path) -> Series:
    try:
        return read_metrics(path)
    except (OSError, ValueError):
        return {}


def metric_names(path: Path) -> list[str]:
    """The columns of a table of metrics, without reading its rows."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return [name for name in next(csv.reader(file), []) if name != "step"]


def _number(cell: str) -> float:
    """A cell as a number; words that some logger wrote are no number."""
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _parsed(text: str) -> dict[str, Any]:
    """A config as values; empty where it holds what only some program can read."""
    try:
        value = yaml.load(text, Loader=_YAML)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}


def _read_json(path: Path) -> Any:
    """None where there is nothing whole yet."""
    try:
        return json.loads(_read_text(path))
    except json.JSONDecodeError:
        return None


def _read_object(path: Path) -> dict[str, Any]:
    value = _read_json(path)
    return value if isinstance(value, dict) else {}


def _read_list(path: Path) -> list[dict[str, Any]]:
    value = _read_json(path)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that grows by whole lines; a torn one, mostly the last, is left out."""
    found = []
    for line in _read_text(path).split("\n")[:-1]:
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
