"""Read the curves of runs from a run folder or from the files that other programs write.

Every format becomes one or more tables, a header and rows of cells, and every table becomes points by column:

- metrics.csv of a run, Lightning's CSVLogger, and any table with a column of steps; separated by `,` `;` `|` or tabs
- W&B's export of a chart: a column `<run> - <metric>` per run, with `__MIN` and `__MAX` beside it
- TensorBoard's export of one metric, CSV (`Wall time,Step,Value`) or JSON
- MLflow's metrics: a row per value, with the columns `key` or `metric`, `value`, `step` and the run, or the files
  `mlruns/…/metrics/<metric>`
- trainer_state.json of transformers, and JSON Lines with one object per step
- the history of Keras, as CSVLogger writes it or as JSON: a row per epoch

Gaps, NaN, repeated headers, columns of the same name and a truncated last line are tolerated and noted.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from .run import Points, Run, make_run

METRICS = "metrics.csv"
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, if available
_GAP = 10  # times the usual distance between rows
# a YAML file of ten lines can expand to billions of values, or contain itself
_MOST_VALUES, _MOST_DEPTH = 100_000, 50

# names of columns, in lower case
_STEPS = (
    *("step", "global_step", "trainer/global_step", "train/global_step", "_step", "iteration", "iter"),
    *("steps", "global step", "current_steps"),
)
_EPOCHS = ("epoch", "epochs", "train/epoch")  # the steps of a table without any, one row per epoch
_METRIC_NAMES = ("key", "metric", "metric_name", "metric name", "tag", "name")  # of a table with one value per row
_RUN_NAMES = ("run", "run_name", "run name", "run_id", "run id", "run_uuid")
_VALUE = "value"
_TIMES = ("wall time", "wall_time", "timestamp", "time", "relative time", "is_nan", "")  # beside a single value

_WANDB_COLUMN = re.compile(r"(?P<run>.+) - (?P<metric>[^ ].*)")
_WANDB_RANGE = ("__MIN", "__MAX")
_TENSORBOARD_NAME = re.compile(r"(?:run-(?P<run>.*)-)?tag-(?P<tag>.+)")
_MLFLOW_FILE = re.compile(r"(\d{12,} \S+ \d+\r?\n?)+")  # time, value, step; the name of the file is the metric
# numbers as spreadsheets write them; a thousand has no leading zero
_DECIMAL_COMMA = re.compile(r"[+-]?(\d*|[1-9]\d{0,2}(\.\d{3})+),\d+([eE][+-]?\d+)?")
_DECIMAL_POINT = re.compile(r"[+-]?[\d,]*\.\d*([eE][+-]?\d+)?")
_COMMA_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?([eE][+-]?\d+)?")
_POINT_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+")
_HELP = "rename the column of steps to step, or export again with the step as the x axis"


@dataclass
class _Table:
    """One table, of one run or of several.

    Attributes:
        header: Names of the columns.
        rows: Cells; a row of another length is not part of the table.
        notes: Irregularities, one sentence each.
    """

    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def find(self, names: Sequence[str]) -> int | None:
        """Return the index of the first column with one of the names, in the order of the names."""
        lower = [name.lower() for name in self.header]
        return next((lower.index(name) for name in names if name in lower), None)


def read_run(path: Path, *, run: str | None = None, steps_per_epoch: float | None = None) -> Run:
    """Read a run's curves, and `config.yaml` or `hparams.yaml`, `summary.json` and `events.jsonl` in the same folder.

    Args:
        path: A folder with a `metrics.csv`, or a file of a format above.
        run: Name of the run, if the file holds several.
        steps_per_epoch: Optimizer steps per epoch; None infers them from the run's columns or config if possible.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, is not a table, or has no step column or no numbers; or it holds several runs and
            none of them is named.
    """
    points, notes = read_points(_find_table(path), run=run)
    return _make_run(_find_table(path).parent, points, notes, steps_per_epoch)


def read_runs(path: Path, *, steps_per_epoch: float | None = None) -> dict[str, Run]:
    """Read every run of a file, like `read_run`, by name; the name is empty if the file does not have one.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, is not a table, or has no step column or no numbers.
    """
    table = _find_table(path)
    found = _read_all_points(table)
    return {name: _make_run(table.parent, points, notes, steps_per_epoch) for name, (points, notes) in found.items()}


def read_points(path: Path, *, run: str | None = None) -> tuple[Points, list[str]]:
    """Read every column's non-empty cells by step, and notes on irregularities, one sentence each.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, is not a table, or has no step column or no numbers; or it holds several runs and
            none of them is named.
    """
    found = _read_all_points(path)
    if run is None and len(found) == 1:
        return next(iter(found.values()))
    if run is None or run not in found:
        raise ValueError(f"{path} holds the runs {', '.join(found)}; choose one of them")
    return found[run]


def _find_table(path: Path) -> Path:
    return path / METRICS if path.is_dir() else path


def _make_run(folder: Path, points: Points, notes: Sequence[str], steps_per_epoch: float | None) -> Run:
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


def _read_all_points(path: Path) -> dict[str, tuple[Points, list[str]]]:
    """Read the points of every run, by its name."""
    if not path.exists():
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}")
    text = _decode(path.read_bytes())
    if not text.strip():
        raise ValueError(f"{path} is empty")
    text, is_torn = _drop_torn_line(text)
    if not text or "\0" in text:
        raise ValueError(f"{path} is not a text file")
    table = _read_json_table(text, path) if text.lstrip()[0] in "[{" else _read_csv_table(text, path)
    found = {}
    for name, one in _split_runs(table, path).items():
        step_column = one.find(_STEPS)
        if step_column is None:
            one, step_column = _with_epochs_as_steps(one, path)
        columns, notes = _collect(one.rows, one.header, step_column)
        if columns:
            torn = ["its last line holds NUL bytes and is left out"] if is_torn else []
            found[name] = columns, [*one.notes, *torn, *notes, *_describe_gaps(columns)]
    if not found:
        raise ValueError(f"{path} has no row with a number")
    return found


def _drop_torn_line(text: str) -> tuple[str, bool]:
    """Drop a last line with NUL bytes, as a loss of power leaves it; return the text and whether there was one."""
    start = text.rfind("\n", 0, max(text.find("\0"), 0)) + 1
    is_text = "\ufffd" not in text[:start]  # else bytes that were no UTF-8
    is_torn = "\0" in text and is_text and "\n" not in text[start:].rstrip("\n")
    return (text[:start], True) if is_torn else (text, False)


def _decode(data: bytes) -> str:
    is_utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")  # what spreadsheets call Unicode text
    text = data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")  # some spreadsheets end a line with a carriage return


def _read_csv_table(text: str, path: Path) -> _Table:
    """Read separated values; the separator is the one that divides the first line into the most cells.

    Raises:
        ValueError: A cell is longer than any number or name, as after a quote that is not closed.
    """
    if _MLFLOW_FILE.fullmatch(text):
        lines = [line.split() for line in text.splitlines()]
        return _Table(["key", "value", "step"], [[path.name, value, step] for _, value, step in lines])
    first, _, rest = text.lstrip("\n").partition("\n")
    if first.lower().startswith("sep="):  # a hint for spreadsheets
        first, _, rest = rest.partition("\n")
    try:
        separator = max(",;\t|", key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))
        rows = list(csv.reader(io.StringIO(f"{first}\n{rest}", newline=""), delimiter=separator))
    except csv.Error as error:
        raise ValueError(f"{path} is not a table: {error}") from error
    typed, *rows = rows
    header, notes = _number_repeated([name.strip().removeprefix("# ") for name in typed])
    rows = [header if row == typed else row for row in rows]
    rows, more_notes = _with_plain_numbers(rows, has_semicolons=separator == ";")
    return _Table(header, rows, notes + more_notes)


def _number_repeated(header: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return different names for columns of the same name, and a note; of W&B's columns, the run gets the number."""
    unique: list[str] = []
    for name in header:
        of_run, new, number = _WANDB_COLUMN.fullmatch(name), name, 1
        while name and new in unique:
            number += 1
            new = f"{name} ({number})" if of_run is None else f"{of_run['run']} ({number}) - {of_run['metric']}"
        unique.append(new)
    changed = [new for new, name in zip(unique, header, strict=True) if new != name and not new.endswith(_WANDB_RANGE)]
    shown = ", ".join(changed[:3]) + (", …" if len(changed) > 3 else "")
    return unique, [f"columns of the same name are numbered: {shown}"] if changed else []


def _with_plain_numbers(rows: list[list[str]], *, has_semicolons: bool) -> tuple[list[list[str]], list[str]]:
    """Write numbers with a decimal point and without thousands separators; return the rows and a note if in doubt.

    The whole file decides: its commas are decimal unless some number has a decimal point, or all could be thousands.

    Args:
        rows: Cells.
        has_semicolons: Whether they separate the cells, as where the comma is the decimal sign: 2,345 is then less
            than 3, and only several commas in a number are separators of thousands.
    """
    cells = {cell.strip() for row in rows for cell in row if "," in cell or "." in cell}
    has_point = any(_DECIMAL_POINT.fullmatch(cell) and not _POINT_THOUSANDS.fullmatch(cell) for cell in cells)
    with_comma = [cell for cell in cells if "," in cell and (_DECIMAL_COMMA.fullmatch(cell) or _is_thousands(cell))]
    if not with_comma:
        return rows, []
    has_several = any(cell.count(",") > 1 for cell in with_comma)
    if not (has_point or (all(map(_is_thousands, with_comma)) and (has_several or not has_semicolons))):
        return [[_from_decimal_comma(cell) for cell in row] for row in rows], []
    rows = [[cell.replace(",", "") if _is_thousands(cell) else cell for cell in row] for row in rows]
    return rows, [] if has_point else ["its commas are read as separators of thousands"]


def _is_thousands(cell: str) -> bool:
    return _COMMA_THOUSANDS.fullmatch(cell.strip()) is not None


def _from_decimal_comma(cell: str) -> str:
    is_number = _DECIMAL_COMMA.fullmatch(cell.strip()) or _POINT_THOUSANDS.fullmatch(cell.strip())
    return cell.replace(".", "").replace(",", ".") if is_number else cell


def _read_json_table(text: str, path: Path) -> _Table:
    """Read JSON, or JSON Lines.

    Raises:
        ValueError: It has neither rows nor columns.
    """
    content = _parse_json(text)
    if content is None:
        content = [_parse_json(line) for line in text.split("\n")]
    if isinstance(content, dict):
        content = content.get("log_history", content.get("history", content))
    if isinstance(content, dict):
        lists = {name: values for name, values in content.items() if isinstance(values, list)}
        num_rows = max(map(len, lists.values()), default=0)
        if lists and not any(name.lower() in (*_STEPS, *_EPOCHS) for name in lists):
            lists["epoch"] = list(range(num_rows))  # as Keras numbers them
        columns = [
            {name: values[row] for name, values in lists.items() if row < len(values)} for row in range(num_rows)
        ]
        content = columns or [content]
    if not isinstance(content, list):
        content = []
    if content and all(isinstance(row, list) and len(row) == 3 for row in content):
        return _Table(["Wall time", "Step", "Value"], [[str(cell) for cell in row] for row in content])
    # the last entry of transformers' trainer has means over the whole run
    rows = [row for row in content if isinstance(row, dict) and "train_runtime" not in row]
    if not rows:
        raise ValueError(f"{path} has no rows: JSON is read as one object per step, or as lists of values by name")
    return _tabulate(rows)


def _tabulate(rows: Iterable[Mapping[str, Any]]) -> _Table:
    rows = list(rows)
    header = list(dict.fromkeys(str(name) for row in rows for name in row))
    return _Table(header, [["" if row.get(name) is None else str(row[name]) for name in header] for row in rows])


def _split_runs(table: _Table, path: Path) -> dict[str, _Table]:
    """Return the table of each run, with one column per metric."""
    steps, value = table.find(_STEPS), table.find((_VALUE,))
    known = {*_STEPS, *_METRIC_NAMES, *_RUN_NAMES, *_TIMES, _VALUE}
    if steps is not None and value is not None and known.issuperset(name.lower() for name in table.header):
        return _spread_values(table, steps, value, path)
    keep = [index for index, name in enumerate(table.header) if not name.endswith(_WANDB_RANGE)]
    prefixed = {index: match for index in keep if (match := _WANDB_COLUMN.fullmatch(table.header[index]))}
    if not prefixed:
        return {"": table}
    shared = [index for index in keep if index not in prefixed]
    found = {}
    for run in dict.fromkeys(match["run"] for match in prefixed.values()):
        own = [index for index, match in prefixed.items() if match["run"] == run]
        header = [table.header[index] for index in shared] + [prefixed[index]["metric"] for index in own]
        rows = [[row[index] for index in (*shared, *own)] for row in table.rows if len(row) == len(table.header)]
        # in the rows of the other runs this one has no value
        rows = [row for row in rows if any(cell.strip() for cell in row[len(shared) :])]
        found[run] = _Table(header, rows, list(table.notes))
    return found


def _spread_values(table: _Table, steps: int, value: int, path: Path) -> dict[str, _Table]:
    """Return a table per run from one with a value per row, whose metric is a column or part of the file's name."""
    metric, run = table.find(_METRIC_NAMES), table.find(_RUN_NAMES)
    from_file = _TENSORBOARD_NAME.fullmatch(path.stem)
    name, notes = "loss", list(table.notes)
    if from_file is not None:
        name = from_file["tag"]
    elif metric is None:
        notes.append("its values are taken as the training loss; to name them, call the file tag-<metric>.csv")
    rows_by_run: dict[str, list[dict[str, str]]] = {}
    for row in table.rows:
        if len(row) == len(table.header):
            of_run = row[run] if run is not None else (from_file["run"] or "" if from_file is not None else "")
            cells = {"step": row[steps], (row[metric] if metric is not None else name): row[value]}
            rows_by_run.setdefault(of_run.strip("."), []).append(cells)
    found = {}
    for of_run, rows in rows_by_run.items():
        by_step: dict[str, dict[str, str]] = {}
        # a row per value becomes a row per step; the values of one metric keep their order
        for cells in rows if metric is None else []:
            by_step[f"{len(by_step)}"] = cells
        for cells in rows if metric is not None else []:
            by_step.setdefault(cells["step"], {}).update(cells)
        found[of_run] = _tabulate(by_step.values())
        found[of_run].notes += notes
    return found


def _with_epochs_as_steps(table: _Table, path: Path) -> tuple[_Table, int]:
    """Return the table with a column of steps made from that of epochs, and its index.

    Raises:
        ValueError: There is no column of epochs either.
    """
    epochs = table.find(_EPOCHS)
    if epochs is None or len(table.rows) < 2:  # one epoch is no curve
        shown = ", ".join(table.header[:8])[:120]
        raise ValueError(
            f"{path} has no column of steps ({', '.join(_STEPS[:7])}) or epochs: {_HELP}; its first line is {shown!r}"
        )
    values = [_parse(row[epochs]) for row in table.rows if len(row) == len(table.header)]
    are_whole = all(value is None or value == int(value) for value in values if value is None or math.isfinite(value))
    rows = [
        [row[epochs] if are_whole else str(number), *(cell for index, cell in enumerate(row) if index != epochs)]
        if len(row) == len(table.header)
        else row
        for number, row in enumerate(table.rows)
    ]
    header = ["step", *(name for index, name in enumerate(table.header) if index != epochs)]
    note = "it has no steps: the steps here are epochs" if are_whole else "it has no steps: the rows are numbered"
    return _Table(header, rows, [*table.notes, note]), 0


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


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    value = _parse_json(read_text(path))
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a JSON Lines file; skip truncated lines, usually the last."""
    values = map(_parse_json, read_text(path).split("\n"))
    return [value for value in values if isinstance(value, dict)]


def parse_yaml(text: str) -> dict[str, Any]:
    """Parse settings; empty if there are none, they have tags of the program that wrote them, or expand endlessly."""
    try:
        value = yaml.load(text, Loader=_YAML)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):  # dates that do not exist, lists as keys
        return {}
    return value if isinstance(value, dict) and is_bounded(value) else {}


def is_bounded(value: object) -> bool:
    """Return whether settings, each repeated one counted again, are as many and as deep as those of a run."""
    waiting: list[tuple[object, int]] = [(value, 0)]
    for _ in range(_MOST_VALUES):
        if not waiting:
            return True
        value, depth = waiting.pop()
        if isinstance(value, dict | list):
            if depth == _MOST_DEPTH or len(waiting) + len(value) > _MOST_VALUES:
                return False
            children = value.values() if isinstance(value, dict) else value
            waiting += [(child, depth + 1) for child in children]
    return not waiting


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # still being written, the run was killed, or nested beyond any metrics
        return None
