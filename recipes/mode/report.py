"""Compare runs on one page. Reads their folders and builds nothing: a fraction of a second per run."""

import glob
import os
from collections.abc import Callable, Sequence
from os.path import commonpath
from pathlib import Path
from typing import Any

from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError
from recipes.files import count
from recipes.foreign_file import reading
from recipes.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    LOG_FILE,
    METRICS_FILE,
    PAGE_FILE,
    PIPELINE_FILE,
    SUMMARY_FILE,
    claim_output,
    find_free_name,
    is_page,
    read_json,
)
from recipes.runtime.console import LOGGER

# files that mark a run folder, earliest first: a run that failed at its start has only a log
_RUN_FILES = (LOG_FILE, EVENTS_FILE, METRICS_FILE, SUMMARY_FILE)


def report(
    resolved: ResolvedRun,
    *,
    runs: list[str] | str,
    sort: str | None,
    path: str | None,
    dashboard: list[Any],
    write: Callable[..., None],
    write_stages: Callable[..., None],
) -> int:
    """Compare runs on one page and log its path.

    Args:
        resolved: Unused; each run has its own config.
        runs: Run folders, globs, or folders that contain run folders.
        sort: Key of `summary.json` or metric to rank the runs by; None: `val_loss`, or the reward if no run has one.
        path: File to write; None is `report.html` in the folder that contains all runs.
        dashboard: Sections of panels.
        write: Writes the page: `(folders, path, sort=, dashboard=)`.
        write_stages: Writes that of a pipeline: `(name, stages, path, dashboard=)`.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: One of `runs` names no run, no run has `sort`, or the page cannot be written.
    """
    del resolved
    runs = [runs] if isinstance(runs, str) else runs
    if len(runs) == 1 and os.path.isfile(state := Path(os.path.expanduser(runs[0])) / PIPELINE_FILE):
        return _report_stages(state, path, dashboard, write_stages)
    folders = find_runs(runs)
    page = claim_output(_page_path(path, folders), "mode.path", is_file=True, replaces=is_page)
    sort = _choose_measure(folders) if sort is None else sort
    parent = Path(commonpath([folder.resolve().parent for folder in folders]))
    with reading(parent, f"mode.runs={runs}", "mode.runs=[<those whose files are whole>]"):
        try:
            write(folders, page, sort=sort, dashboard=dashboard)
        except LookupError as error:
            if type(error) is not LookupError:  # a KeyError or IndexError is that of a damaged file
                raise
            raise ConfigError(f"mode.sort={sort}", str(error), "mode.sort=<one of these>") from error
    LOGGER.info(f"{len(folders)} run{'' if len(folders) == 1 else 's'} compared by {sort}")
    LOGGER.info(str(page))
    return 0


def _report_stages(state: Path, path: str | None, dashboard: list[Any], write: Callable[..., None]) -> int:
    """Write the page of a pipeline, from its own record of its stages."""
    with reading(state, f"mode.runs=[{state.parent}]", "mode.runs=[<a folder in it>]"):
        pipeline = read_json(state, fix="the command of the pipeline, which writes it")
        stages = {
            name: {**stage, "folder": str(state.parent / stage["folder"])} for name, stage in pipeline["stages"].items()
        }
        page = _page_path(path, [Path(stage["folder"]) for stage in stages.values()])
        claim_output(page, "mode.path", is_file=True, replaces=is_page)
        write(pipeline["pipeline"], stages, page, dashboard=dashboard)
    LOGGER.info(f"{count(len(pipeline['stages']), 'stage')} of {pipeline['pipeline']}")
    LOGGER.info(str(page))
    return 0


def _choose_measure(folders: Sequence[Path]) -> str:
    """Return what ranks the runs: the validation loss, or the reward if they are policies, which have none."""
    written = set()
    for file in (folder / METRICS_FILE for folder in folders):
        if file.is_file():
            with file.open(encoding="utf-8", errors="replace") as lines:
                written.update(lines.readline().strip().split(","))
    return "val/reward" if "val/reward" in written and "val/loss" not in written else "val_loss"


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Return the unique run folders that match paths and globs.

    Args:
        patterns: Run folders, globs, or folders that contain run folders up to two levels below.

    Raises:
        ConfigError: There is no pattern, or one names no run.
    """
    if not patterns:
        raise ConfigError("mode.runs=[]", "no run is named", "mode.runs=[logs/<name>]")
    folders = [folder for pattern in patterns for folder in _expand(pattern)]
    return list({folder.resolve(): folder for folder in folders}.values())


def _expand(pattern: str) -> list[Path]:
    """Return the run folders that match one path or glob."""
    expanded = os.path.expanduser(pattern)  # unlike Path's, it accepts a user that does not exist
    matches = [Path(expanded)] if os.path.exists(expanded) else list(map(Path, glob.glob(expanded)))
    fix = "mode.runs=[<run folders, globs or a sweep's folder>]"
    if not matches:
        raise ConfigError(f"mode.runs=[{pattern}]", "there is no such folder", fix)
    runs = [run for match in sorted(matches) for run in _runs_below(match, depth=2)]
    if not runs:
        if any(event for match in matches for event in match.glob("**/events.out.tfevents.*")):
            reason = f"it has the events of TensorBoard, and no {METRICS_FILE}"
            fix = "mode=diagnose mode.runs=[<a CSV that TensorBoard exports>], or Trainer(logger=CSVLogger(…))"
            raise ConfigError(f"mode.runs=[{pattern}]", reason, fix)
        raise ConfigError(f"mode.runs=[{pattern}]", "there is no run in it", fix)
    return runs


def _runs_below(folder: Path, *, depth: int) -> list[Path]:
    """Return the folder itself if it is a run, else the runs in it: one level down in a sweep, two in `logs`."""
    if _is_run(folder):
        return [folder]
    # os.path and os.access: unlike Path's methods, false where this user may not look
    if depth == 0 or not os.path.isdir(folder) or not os.access(folder, os.R_OK | os.X_OK):
        return []
    try:
        children = sorted(folder.iterdir())
    except OSError:  # of a process that has just ended, in /proc
        return []
    return [run for child in children for run in _runs_below(child, depth=depth - 1)]


def _is_run(folder: Path) -> bool:
    config = folder / CONFIG_FILE
    # a config with a defaults list, as in conf/, is not composed and belongs to no run
    is_frozen = (
        os.path.isfile(config)
        and os.access(config, os.R_OK)
        and "\ndefaults:" not in config.read_text(errors="replace", encoding="utf-8")
    )
    return is_frozen or any(os.path.isfile(folder / name) for name in _RUN_FILES)


def _page_path(path: str | None, folders: Sequence[Path]) -> Path:
    if path is not None:
        given = Path(os.path.expanduser(path))
        page = given / PAGE_FILE if given.is_dir() else given
        if page.name == PAGE_FILE and _is_run(page.parent):
            reason = f"{page.parent} is a run, whose own page has this name"
            raise ConfigError(f"mode.path={path}", reason, f"mode.path={find_free_name(page)}")
        return page
    parent = Path(commonpath([folder.resolve().parent for folder in folders]))
    if _is_run(parent):
        raise ConfigError("mode.path=null", f"{parent} is a run with a page of its own", "mode.path=<a file>")
    return parent / PAGE_FILE
