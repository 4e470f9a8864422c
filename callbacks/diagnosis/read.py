"""Read a run folder or any metrics.csv, tolerating gaps, NaN, repeated headers and a truncated last line."""

import csv
import io
import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from .run import Points, Run, make_run

METRICS = "metrics.csv"
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, if available
_STEP_COLUMNS = ("step", "global_step", "trainer/global_step", "_step", "iteration", "iter")
_GAP = 10  # times the usual distance between rows


def read_run(path: Path, *, steps_per_epoch: float | None = None) -> Run:
    """Read a run's curves, and `config.yaml` or `hparams.yaml`, `summary.json` and `events.jsonl` in the same folder.

    Args:
        path: A folder with a `metrics.csv`, or a metrics CSV file of any name.
        steps_per_epoch: Optimizer steps per epoch; None infers them from the run's columns or config if possible.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, is not a table, or has no step column or no numbers.
    """
    table = path / METRICS if path.is_dir() else path
    points, notes = read_points(table)
    folder = table.parent
    summary = read_object(folder / "summary.json")
    return make_run(
        points,
        folder=folder,
        config=parse_yaml(read_text(folder / "config.yaml")) or parse_yaml(read_text(folder / "hparams.yaml")),
        status=str(summary["status"]) if "status" in summary else None,
        events=read_lines(folder / "events.jsonl"),
        steps_per_epoch=steps_per_epoch,
        notes=notes,
    )


def read_points(path: Path) -> tuple[Points, list[str]]:
    """Read every column's non-empty cells by step, and notes on irregularities, one sentence each.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, is not a table, or has no step column or no numbers.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}")
    text = path.read_bytes().decode("utf-8-sig", errors="replace")
    if not text.strip():
        raise ValueError(f"{path} is empty")
    if "\0" in text:
        raise ValueError(f"{path} is not a text file")
    rows = list(csv.reader(io.StringIO(text, newline="")))
    header = [name.strip() for name in rows[0]]
    step_column = next((header.index(name) for name in _STEP_COLUMNS if name in header), None)
    if step_column is None:
        shown = ", ".join(header[:8])[:120]
        raise ValueError(f"{path} has no column of steps ({', '.join(_STEP_COLUMNS)}); its first line is {shown!r}")
    columns, notes = _collect(rows[1:], header, step_column)
    if not columns:
        raise ValueError(f"{path} has no row with a number")
    return columns, [*notes, *_describe_gaps(columns)]


def _collect(rows: list[list[str]], header: list[str], step_column: int) -> tuple[Points, list[str]]:
    """Return each column's values by ascending step, and notes; if a step is repeated, the last row counts."""
    columns: dict[str, dict[int, float]] = {}
    repeated = cut = unreadable = backwards = 0
    previous = -math.inf
    for number, row in enumerate(rows):
        if [cell.strip() for cell in row] == header:
            repeated += 1
            continue
        if len(row) != len(header):
            # a killed or still running run leaves an incomplete line
            cut, unreadable = cut + (number == len(rows) - 1), unreadable + (0 < number < len(rows) - 1 and bool(row))
            continue
        step = _parse(row[step_column])
        if step is None or not math.isfinite(step):
            unreadable += 1
            continue
        backwards += step < previous
        previous = step
        for name, cell in zip(header, row, strict=True):
            if name != header[step_column] and cell.strip() and (value := _parse(cell)) is not None:
                columns.setdefault(name, {})[int(step)] = value
    notes = []
    if repeated:
        notes.append(f"the header is repeated {repeated} times")
    if cut:
        notes.append("the last line is cut off and was skipped")
    if unreadable:
        notes.append(f"{unreadable} lines are not rows of this table and were skipped")
    if backwards:
        notes.append(f"the steps go back {backwards} times; the later row of a repeated step counts")
    return {name: sorted(points.items()) for name, points in columns.items()}, notes


def _parse(cell: str) -> float | None:
    """Return a cell as a number, including NaN and inf; None for text."""
    try:
        return float(cell)
    except ValueError:
        return None


def _describe_gaps(columns: Points) -> list[str]:
    steps = sorted({step for column in columns.values() for step, _ in column})
    distances = [after - before for before, after in pairwise(steps)]
    if len(distances) < 10:
        return []
    usual = median(distances)
    gaps = [(a, b) for a, b in pairwise(steps) if b - a > _GAP * usual]
    if not gaps:
        return []
    first, last = gaps[0]
    return [f"{len(gaps)} gaps between rows, the first from step {first:,} to {last:,}"]


def read_text(path: Path) -> str:
    """Return the text of a file; empty if it does not exist."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it does not exist or is incomplete."""
    return _parse_json(read_text(path))


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a JSON Lines file; skip truncated lines, usually the last."""
    values = map(_parse_json, read_text(path).split("\n"))
    return [value for value in values if isinstance(value, dict)]


def parse_yaml(text: str) -> dict[str, Any]:
    """Parse settings; empty if there are none or they contain tags of the program that wrote them."""
    try:
        value = yaml.load(text, Loader=_YAML)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:  # still being written, or the run was killed
        return None
