"""Diagnose problems of runs from their curves. Reads files and builds nothing: a fraction of a second per run."""

import glob
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError, escape_controls
from recipes.files import write_atomically
from recipes.foreign_file import reading
from recipes.mode.report import find_runs
from recipes.run_folder import METRICS_FILE, claim_output
from recipes.runtime import status
from recipes.runtime.console import LOGGER

_FIX = f"mode.runs=[<a run folder, or a file like {METRICS_FILE}>]"


def diagnose(
    resolved: ResolvedRun,
    *,
    runs: list[str] | str,
    path: str | None,
    steps_per_epoch: Annotated[float, "> 0"] | None,
    diagnose_run: Callable[..., Any],
) -> int:
    """Log the findings of each run, and write them as JSON.

    Args:
        resolved: Unused; each run has its own config.
        runs: Run folders, globs, folders that contain run folders, or files of metrics.
        path: JSON file for the findings of all runs; None writes no file.
        steps_per_epoch: Optimizer steps per epoch; None derives it from the column `epoch`, if there is one.
        diagnose_run: `(path, steps_per_epoch=)` -> diagnoses by the name of the run in the file, which is empty if it
            has none; each has `lines()` and `as_dict()`.

    Returns:
        The exit code, always 0.

    Raises:
        ConfigError: One of `runs` names no run or no table of metrics, or `path` cannot be written.
    """
    del resolved
    if steps_per_epoch is not None and not steps_per_epoch > 0:
        raise ConfigError(
            f"mode.steps_per_epoch={steps_per_epoch}", "an epoch has at least one step", "mode.steps_per_epoch=null"
        )
    file = None if path is None else claim_output(path, "mode.path", is_file=True, replaces=_is_own)
    found: dict[str, Any] = {}
    tables = _find_tables([runs] if isinstance(runs, str) else runs)
    for number, run in enumerate(tables, 1):
        status.say(f"{run}, {number} of {len(tables)}")
        with reading(run, f"mode.runs=[{run}]", _FIX):
            try:
                diagnoses = diagnose_run(run, steps_per_epoch=steps_per_epoch)
            except (OSError, ValueError) as error:
                raise ConfigError(f"mode.runs=[{run}]", str(error), _FIX) from error
        for name, diagnosis in diagnoses.items():
            title = f"{run}: {name}" if name else str(run)
            LOGGER.info(escape_controls(f"{title}:"))
            for line in diagnosis.lines():
                LOGGER.info(escape_controls(f"  {line}"))
            found[title] = diagnosis.as_dict()
    if file is not None:
        write_atomically(file, json.dumps(found, indent=2) + "\n")
    return 0


def _is_own(text: str) -> bool:
    """Return whether a text is that of findings: an object per run."""
    content = json.loads(text)
    return (
        isinstance(content, dict)
        and bool(content)
        and all(isinstance(found, dict) and found.keys() >= {"findings", "examined"} for found in content.values())
    )


def _find_tables(patterns: Sequence[str]) -> list[Path]:
    """Return the unique folders and files that match the patterns; log which runs have no metrics yet.

    Raises:
        ConfigError: There is no pattern, one names no run, or no run has metrics.
    """
    if not patterns:
        raise ConfigError("mode.runs=[]", "no run is named", "mode.runs=[logs/<name>]")
    found = [path for pattern in patterns for path in _expand(pattern)]
    tables = [path for path in found if os.path.isfile(path) or os.path.isfile(path / METRICS_FILE)]
    if not tables:
        raise ConfigError(f"mode.runs=[{','.join(patterns)}]", f"no run in it has a {METRICS_FILE}", _FIX)
    for path in found:
        if path not in tables:
            LOGGER.info(escape_controls(f"{path}: no {METRICS_FILE} yet"))
    return list({path.resolve(): path for path in tables}.values())


def _expand(pattern: str) -> list[Path]:
    """Return the files and run folders that match one path or glob."""
    expanded = os.path.expanduser(pattern)  # unlike Path's, it accepts a user that does not exist
    matches = [Path(expanded)] if os.path.exists(expanded) else sorted(map(Path, glob.glob(expanded)))
    files = [match for match in matches if os.path.isfile(match)]  # unlike Path's, false where one may not look
    folders = [str(match) for match in matches if match not in files]
    return [*files, *find_runs(folders or [pattern])] if folders or not files else files
