"""File names and readers for the files in a run folder; `recipes.files` writes them."""

import csv
import errno
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes.errors import ConfigError
from recipes.files import describe, probe, write_atomically

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
EVENTS_FILE = "events.jsonl"
LOG_FILE = "train.log"
METRICS_FILE = "metrics.csv"
PLAN_FILE = "plan.json"
SAMPLES_FILE = "samples.jsonl"
SUMMARY_FILE = "summary.json"
EVALUATIONS = "evaluations"  # field of the summary that mode=evaluate writes
CHECKPOINTS = "checkpoints"
OOM_FOLDER = "oom"
ROLLED_BACK_FOLDER = "rolled_back"
SPIKES_FOLDER = "spikes"
TOKENIZER_FOLDER = "tokenizer"


def create_new(folder: Path, *, stem: str) -> Path:
    """Create and return a new folder; if it exists, append the next free number to `stem`."""
    for number in itertools.count(2):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            folder = folder.with_name(f"{stem}_{number}")
        else:
            break
    return folder


def claim_output(path: str | Path, setting: str, *, is_file: bool = False) -> Path:
    """Return the folder or file that a mode writes at its end; create its folder and check that it takes files.

    Call it before the work: what could not be kept at the end would be found only then.

    Args:
        path: As set; `~` is the home folder.
        setting: Its key, for the error message.
        is_file: Whether `path` names a file, whose folder is created.

    Raises:
        ConfigError: The disk is full, or the folder cannot be created or written to.
    """
    target = Path(path).expanduser()
    folder = target.parent if is_file else target
    try:
        if is_file and target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        folder.mkdir(parents=True, exist_ok=True)
        probe(folder)
    except OSError as error:
        kind = "file" if is_file else "folder"
        is_in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a file has the name of its folder" if is_in_the_way else describe(error)
        fix = f"{setting}=<a {kind} of yours on a disk with space>"
        raise ConfigError(f"{setting}={path}", f"it cannot be written to: {reason}", fix) from error
    return target


def find_run_folder(path: Path) -> Path | None:
    """Return `path` if it is a run folder, or the run folder that contains the checkpoint `path`; None otherwise."""
    for candidate in (path, path.parent.parent):
        if os.path.isfile(candidate / CONFIG_FILE):  # unlike Path.is_file, returns False if the name is too long
            return candidate
    return None


def has_checkpoint(run_folder: Path) -> bool:
    """Return whether a run folder has a complete checkpoint; its hashes are not verified."""
    folder = run_folder / CHECKPOINTS
    # a tool that knows no links may have copied `last` alone
    return any(next(folder.glob(f"{name}/manifest.json"), None) for name in ("step_*.ckpt", "last", "best"))


# Each reader raises a ConfigError that names the file, the problem and the fix: people edit these files, copy them
# incompletely and open them in spreadsheets.


def read_config(run_folder: Path) -> dict[str, Any]:
    """Read the frozen config, without the `hydra` node.

    Raises:
        ConfigError: The file cannot be read, or is not a YAML mapping.
    """
    import yaml

    path = run_folder / CONFIG_FILE
    fix = f"a copy of the {CONFIG_FILE} that the run wrote, or a new run without this folder"
    try:
        config = yaml.safe_load(_read_text(path, fix))
    except yaml.YAMLError as error:
        raise ConfigError(str(path), f"it is not valid YAML: {' '.join(str(error).split())}", fix) from error
    if not isinstance(config, dict):
        raise ConfigError(str(path), f"it {_describe(config)}, not settings", fix)
    return {key: value for key, value in config.items() if key != "hydra"}


def read_environment(run_folder: Path) -> dict[str, Any]:
    """Read environment.json.

    Raises:
        ConfigError: The file cannot be read, or is not a JSON object.
    """
    path = run_folder / ENVIRONMENT_FILE
    return read_json(path, fix=f"rm {path}, and the run resumes from its {CONFIG_FILE} alone")


def read_summary(run_folder: Path) -> dict[str, Any] | None:
    """Read summary.json; return None if the run has not ended.

    Raises:
        ConfigError: The file cannot be read, or is not a JSON object.
    """
    path = run_folder / SUMMARY_FILE
    return read_json(path, fix=f"rm {path}, and the run counts as not ended") if path.is_file() else None


def add_evaluations(run_folder: Path, evaluations: Mapping[str, Mapping[str, Any]]) -> None:
    """Add evaluation results to summary.json, keeping its other fields.

    Args:
        run_folder: Folder of a run, finished or not.
        evaluations: Split or task -> checkpoint and metrics; replaces earlier results of the same name.

    Raises:
        ConfigError: summary.json exists but cannot be read.
        OSError: summary.json cannot be written.
    """
    summary = read_summary(run_folder) or {}
    earlier = summary.get(EVALUATIONS)
    added = {name: {key: _for_json(value) for key, value in found.items()} for name, found in evaluations.items()}
    summary[EVALUATIONS] = (earlier if isinstance(earlier, dict) else {}) | added
    # a run that is still training, and other evaluations of it, may write the same file now
    write_atomically(run_folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n", is_shared=True)


def _for_json(value: Any) -> Any:
    """Return `value`, or None for NaN and inf, which JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path, *, fix: str) -> dict[str, Any]:
    """Read a file with one JSON object.

    Args:
        path: File to read.
        fix: What to type if the file is damaged.

    Raises:
        ConfigError: The file cannot be read, or is not a JSON object.
    """
    text = _read_text(path, fix)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(str(path), f"invalid JSON: {error}" if text.strip() else "it is empty", fix) from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), f"it {_describe(content)}, not an object", fix)
    return content


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file (events.jsonl, samples.jsonl), skipping blank lines; empty if there is no file.

    Raises:
        ConfigError: A line is not a JSON object.
    """
    return [read_json_line(line, number, path) for number, line in enumerate(complete_lines(path), 1) if line.strip()]


def read_json_line(line: str, number: int, path: Path) -> dict[str, Any]:
    """Parse one line of a JSON Lines file.

    Raises:
        ConfigError: The line is not a JSON object.
    """
    fix = f"the file without that line, or mv {path} {path}.old"
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ConfigError(str(path), f"line {number} is not valid JSON: {error}", fix) from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), f"line {number} {_describe(content)}, not an object", fix)
    return content


def check_metrics(path: Path) -> None:
    """Check that every row of a metrics.csv starts with its step; does nothing if there is no file.

    Raises:
        ConfigError: Another program has rewritten the file.
    """
    _check_steps(list(complete_lines(path)), path)


def read_cells(path: Path) -> list[dict[str, str]]:
    """Read the rows of a metrics.csv as text, including empty cells; empty if there is no file.

    Raises:
        ConfigError: Another program has rewritten the file.
    """
    lines = list(complete_lines(path))
    _check_steps(lines, path)
    return list(csv.DictReader(lines))


def read_rows(path: Path) -> list[dict[str, float]]:
    """Read the rows of a metrics.csv as numbers, skipping empty cells; empty if there is no file.

    Raises:
        ConfigError: Another program has rewritten the file.
    """
    rows = read_cells(path)
    try:
        return [as_numbers(row) for row in rows]
    except (ValueError, TypeError) as error:
        raise ConfigError(str(path), f"one of its cells is not a number: {error}", _fix_metrics(path)) from error


def as_numbers(row: dict[str, str]) -> dict[str, float]:
    """Convert a row of text cells to numbers, skipping empty cells."""
    return {name: float(cell) for name, cell in row.items() if cell}


def complete_lines(path: Path) -> Iterable[str]:
    """Return the complete lines of a text file; a killed run may leave an incomplete last line.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
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
    """Check the first column, which spreadsheets change: `;` as separator, a byte order mark, 1.0 instead of 1."""
    for number, line in enumerate(lines, start=1):
        first = line.strip().partition(",")[0]
        if number == 1 and first != "step":
            raise ConfigError(str(path), f"its first column is {first[:60]!r}, not step", _fix_metrics(path))
        if number > 1 and not first.isdecimal():
            raise ConfigError(str(path), f"line {number} begins with {first[:60]!r}, not a step", _fix_metrics(path))


def _fix_metrics(path: Path) -> str:
    return f"a copy that no other program has saved, or mv {path} {path}.old: the run then begins a new one"


def _describe(content: object) -> str:
    """Describe the content of a file that does not hold a mapping."""
    if content is None:
        return "is empty"
    return f"holds a {'list' if isinstance(content, list) else 'single value'}"
