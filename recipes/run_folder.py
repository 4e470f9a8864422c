"""The files of a run folder: their names, one function that writes small files atomically, one reader per file."""

import csv
import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
EVENTS_FILE = "events.jsonl"
LOG_FILE = "train.log"
METRICS_FILE = "metrics.csv"
SAMPLES_FILE = "samples.jsonl"
SUMMARY_FILE = "summary.json"
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
        if (candidate / CONFIG_FILE).is_file():
            return candidate
    return None


def has_checkpoint(run_folder: Path) -> bool:
    """Return whether a run folder has a complete checkpoint; its hashes are not verified."""
    return any((run_folder / CHECKPOINTS).glob("step_*.ckpt/manifest.json"))


def read_config(run_folder: Path) -> dict[str, Any]:
    """Read the frozen config, without Hydra's own node."""
    import yaml

    config: dict[str, Any] = yaml.safe_load((run_folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key != "hydra"}


def read_environment(run_folder: Path) -> dict[str, Any]:
    """Read environment.json."""
    environment: dict[str, Any] = json.loads((run_folder / ENVIRONMENT_FILE).read_text())
    return environment


def read_summary(run_folder: Path) -> dict[str, Any] | None:
    """Read summary.json; None if the run has not ended."""
    path = run_folder / SUMMARY_FILE
    if not path.is_file():
        return None
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines (events.jsonl, samples.jsonl); empty if there is none."""
    return [json.loads(line) for line in complete_lines(path)]


def read_cells(path: Path) -> list[dict[str, str]]:
    """Read the rows of a metrics.csv as text, empty cells included; empty if there is no file."""
    return list(csv.DictReader(complete_lines(path)))


def read_rows(path: Path) -> list[dict[str, float]]:
    """Read the rows of a metrics.csv as numbers, without empty cells; empty if there is no file."""
    return [as_numbers(row) for row in read_cells(path)]


def as_numbers(row: dict[str, str]) -> dict[str, float]:
    """Turn a row of text cells into numbers, without empty cells."""
    return {name: float(cell) for name, cell in row.items() if cell}


def complete_lines(path: Path) -> Iterable[str]:
    """Return the complete lines of a text file; a killed run may leave an incomplete last line."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]
