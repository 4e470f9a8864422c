"""What a run left in its folder, as plain values: one pass over each file, no Lightning."""

import csv
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Point = tuple[int, float]  # step, value


@dataclass(frozen=True)
class RunRecord:
    """The files of a run folder. A file that is not there, or not yet, is empty here."""

    folder: Path
    series: dict[str, list[Point]]  # by metric name, in the order of the file
    events: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    summary: dict[str, Any]
    environment: dict[str, Any]
    config_text: str

    @property
    def name(self) -> str:
        """`name:` of the config, else the folder's name."""
        found = re.search(r"^name:\s*(\S.*?)\s*$", self.config_text, flags=re.MULTILINE)
        return found.group(1).strip("'\"") if found else self.folder.name

    def last(self, metric: str) -> float | None:
        """The metric's last value; None if it was never logged."""
        points = self.series.get(metric)
        return points[-1][1] if points else None

    @property
    def last_step(self) -> int | None:
        return max((points[-1][0] for points in self.series.values()), default=None)


def read_run(folder: Path) -> RunRecord:
    """Read `metrics.csv` and what else there is.

    Raises FileNotFoundError without `metrics.csv`, ValueError if its header has no `step`.
    """
    return RunRecord(
        folder=folder.resolve(),
        series=read_metrics(folder / "metrics.csv"),
        events=_read_lines(folder / "events.jsonl"),
        samples=_read_lines(folder / "samples.jsonl"),
        summary=_read_object(folder / "summary.json"),
        environment=_read_object(folder / "environment.json"),
        config_text=_read_text(folder / "config.yaml"),
    )


def read_metrics(path: Path) -> dict[str, list[Point]]:
    """Each column's filled cells with their steps; a row cut off in mid-write is left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        if "step" not in header:
            raise ValueError(f"{path}: the header {header} has no column 'step'")
        at = header.index("step")
        columns = [(i, name) for i, name in enumerate(header) if i != at]
        series: dict[str, list[Point]] = {name: [] for _, name in columns}
        for row in rows:
            if len(row) != len(header):
                continue
            step = int(float(row[at]))
            for i, name in columns:
                if row[i] != "":
                    series[name].append((step, _number(row[i])))
    return {name: points for name, points in series.items() if points}


def _number(cell: str) -> float:
    """A cell as a number; words that some logger wrote are no number."""
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _read_object(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    value = json.loads(text) if text else {}
    return value if isinstance(value, dict) else {"value": value}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that grows by whole lines; its last line may be a torn one."""
    lines = _read_text(path).split("\n")
    return [json.loads(line) for line in lines[:-1] if line.strip()]
