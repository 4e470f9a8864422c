"""The files of a run folder: their names, one function that writes small files atomically, one reader per file."""

import csv
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes.errors import ConfigError

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
EVENTS_FILE = "events.jsonl"
LOG_FILE = "train.log"
METRICS_FILE = "metrics.csv"
PLAN_FILE = "plan.json"
SAMPLES_FILE = "samples.jsonl"
SUMMARY_FILE = "summary.json"
EVALUATIONS = "evaluations"  # its field that mode=evaluate writes
CHECKPOINTS = "checkpoints"
OOM_FOLDER = "oom"
ROLLED_BACK_FOLDER = "rolled_back"
SPIKES_FOLDER = "spikes"
TOKENIZER_FOLDER = "tokenizer"


def write_atomically(path: Path, text: str, *, fsync: bool = False) -> None:
    """Write a small file so that a reader, or a kill, finds the old content or the new, never a part of it.

    Args:
        path: The file; its folder exists.
        text: The complete content.
        fsync: Whether to wait until the disk has it, for files that must survive a power failure.

    Raises:
        OSError: The disk is full or the folder cannot be written to; the old content is still there.
    """
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.unlink(missing_ok=True)  # a killed process left it, or a folder from elsewhere has a link there
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        if fsync:
            file.flush()
            os.fsync(file.fileno())
    unfinished.replace(path)


def create_new(folder: Path, *, stem: str) -> Path:
    """Create a folder that did not exist, `stem` with the next free number if another process is faster; return it."""
    for number in itertools.count(2):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            folder = folder.with_name(f"{stem}_{number}")
        else:
            break
    return folder


def find_run_folder(path: Path) -> Path | None:
    """Return the run folder that `path` is, or that it is a checkpoint of; None if neither has a config."""
    for candidate in (path, path.parent.parent):
        if os.path.isfile(candidate / CONFIG_FILE):  # unlike Path.is_file, false for a name that is too long
            return candidate
    return None


def has_checkpoint(run_folder: Path) -> bool:
    """Return whether a run folder has a complete checkpoint; its hashes are not verified."""
    return any((run_folder / CHECKPOINTS).glob("step_*.ckpt/manifest.json"))


# Each reader raises a ConfigError that names the file, what is wrong with it and what to do: people edit these files,
# copy them half and open them in spreadsheets.


def read_config(run_folder: Path) -> dict[str, Any]:
    """Read the frozen config, without Hydra's own node.

    Raises:
        ConfigError: It cannot be read, or is no YAML mapping.
    """
    import yaml

    path = run_folder / CONFIG_FILE
    fix = f"a copy of the {CONFIG_FILE} that the run wrote, or a new run without this folder"
    try:
        config = yaml.safe_load(_read_text(path, fix))
    except yaml.YAMLError as error:
        raise ConfigError(str(path), f"it is no valid YAML: {' '.join(str(error).split())}", fix) from error
    if not isinstance(config, dict):
        raise ConfigError(str(path), f"it {_describe(config)}, not settings", fix)
    return {key: value for key, value in config.items() if key != "hydra"}


def read_environment(run_folder: Path) -> dict[str, Any]:
    """Read environment.json.

    Raises:
        ConfigError: It cannot be read, or is no JSON object.
    """
    path = run_folder / ENVIRONMENT_FILE
    return read_json(path, fix=f"rm {path}, and the run resumes from its {CONFIG_FILE} alone")


def read_summary(run_folder: Path) -> dict[str, Any] | None:
    """Read summary.json; None if the run has not ended.

    Raises:
        ConfigError: It cannot be read, or is no JSON object.
    """
    path = run_folder / SUMMARY_FILE
    return read_json(path, fix=f"rm {path}, and the run counts as not ended") if path.is_file() else None


def add_evaluations(run_folder: Path, evaluations: Mapping[str, Mapping[str, Any]]) -> None:
    """Add results of evaluations to summary.json, and leave what else is in it as it is.

    Args:
        run_folder: Of a run that has ended or not.
        evaluations: By split or task: the checkpoint, and its metrics; replaces earlier ones of the same name.

    Raises:
        ConfigError: There is a summary.json that cannot be read.
        OSError: It cannot be written.
    """
    summary = read_summary(run_folder) or {}
    earlier = summary.get(EVALUATIONS)
    added = {name: {key: _for_json(value) for key, value in found.items()} for name, found in evaluations.items()}
    summary[EVALUATIONS] = (earlier if isinstance(earlier, dict) else {}) | added
    write_atomically(run_folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def _for_json(value: Any) -> Any:
    """Return a value, or None for NaN and inf, which JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path, *, fix: str) -> dict[str, Any]:
    """Read a file with one JSON object.

    Args:
        path: The file.
        fix: What to type if it is damaged.

    Raises:
        ConfigError: It cannot be read, or is no JSON object.
    """
    text = _read_text(path, fix)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(str(path), f"it is no valid JSON: {error}" if text.strip() else "it is empty", fix) from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), f"it {_describe(content)}, not an object", fix)
    return content


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines (events.jsonl, samples.jsonl), without blank ones; empty if there is none.

    Raises:
        ConfigError: A line is no JSON object.
    """
    return [read_json_line(line, number, path) for number, line in enumerate(complete_lines(path), 1) if line.strip()]


def read_json_line(line: str, number: int, path: Path) -> dict[str, Any]:
    """Read one line of a file of JSON lines.

    Raises:
        ConfigError: It is no JSON object.
    """
    fix = f"the file without that line, or mv {path} {path}.old"
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ConfigError(str(path), f"line {number} is no valid JSON: {error}", fix) from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), f"line {number} {_describe(content)}, not an object", fix)
    return content


def check_metrics(path: Path) -> None:
    """Check that every row of a metrics.csv begins with its step, without reading the numbers; nothing without a file.

    Raises:
        ConfigError: Another program has rewritten it.
    """
    _check_steps(list(complete_lines(path)), path)


def read_cells(path: Path) -> list[dict[str, str]]:
    """Read the rows of a metrics.csv as text, empty cells included; empty if there is no file.

    Raises:
        ConfigError: Another program has rewritten it.
    """
    lines = list(complete_lines(path))
    _check_steps(lines, path)
    return list(csv.DictReader(lines))


def read_rows(path: Path) -> list[dict[str, float]]:
    """Read the rows of a metrics.csv as numbers, without empty cells; empty if there is no file.

    Raises:
        ConfigError: Another program has rewritten it.
    """
    rows = read_cells(path)
    try:
        return [as_numbers(row) for row in rows]
    except (ValueError, TypeError) as error:
        raise ConfigError(str(path), f"one of its cells is not a number: {error}", _fix_metrics(path)) from error


def as_numbers(row: dict[str, str]) -> dict[str, float]:
    """Turn a row of text cells into numbers, without empty cells."""
    return {name: float(cell) for name, cell in row.items() if cell}


def complete_lines(path: Path) -> Iterable[str]:
    """Return the complete lines of a text file; a killed run may leave an incomplete last line.

    Raises:
        ConfigError: It cannot be read, or is not UTF-8.
    """
    if not path.is_file():
        return []
    lines = _read_text(path, f"mv {path} {path}.old").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def _read_text(path: Path, fix: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"byte {error.start} of it is not UTF-8 text", fix) from error
    except OSError as error:
        raise ConfigError(str(path), f"it cannot be read: {error.strerror}", fix) from error


def _check_steps(lines: list[str], path: Path) -> None:
    """Check the first column, which a spreadsheet changes: `;` between the columns, a byte order mark, 1.0 for 1."""
    for number, line in enumerate(lines, start=1):
        first = line.strip().partition(",")[0]
        if number == 1 and first != "step":
            raise ConfigError(str(path), f"its first column is {first[:60]!r}, not step", _fix_metrics(path))
        if number > 1 and not first.isdecimal():
            raise ConfigError(str(path), f"line {number} begins with {first[:60]!r}, not a step", _fix_metrics(path))


def _fix_metrics(path: Path) -> str:
    return f"a copy that no other program has saved, or mv {path} {path}.old: the run then begins a new one"


def _describe(content: object) -> str:
    """Describe what a file holds instead of a mapping."""
    if content is None:
        return "is empty"
    return f"holds a {'list' if isinstance(content, list) else 'single value'}"
