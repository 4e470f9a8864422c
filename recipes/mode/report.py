"""Runs side by side on one page. Reads their folders and builds nothing: a fraction of a second a run."""

import glob
from collections.abc import Callable, Sequence
from os.path import commonpath
from pathlib import Path
from typing import Any

from recipes.config.compose import Composed
from recipes.errors import ConfigError
from recipes.run_folder import CONFIG_FILE, EVENTS_FILE, LOG_FILE, METRICS_FILE, SUMMARY_FILE
from recipes.runtime.console import LOGGER

PAGE = "report.html"
# what a run leaves, the earliest first: one that failed at its start has a log alone
LEFT_BY_A_RUN = (LOG_FILE, EVENTS_FILE, METRICS_FILE, SUMMARY_FILE)


def report(
    composed: Composed,
    *,
    runs: list[str] | str,
    sort: str,
    path: str | None,
    dashboard: list[Any],
    write: Callable[..., None],
) -> int:
    """Compare runs on one page and say where it is.

    Args:
        composed: Not needed: what is compared has been composed before.
        runs: Run folders, globs, or folders of run folders.
        sort: What the best run is best in: a number of `summary.json` or a metric.
        path: The page; None: `report.html` in the folder that all runs lie in.
        dashboard: Sections of panels.
        write: Writes it: `(folders, path, sort=, dashboard=)`.

    Raises:
        ConfigError: There is no run where one was named, or none has `sort`.
    """
    del composed
    folders = find_runs([runs] if isinstance(runs, str) else runs)
    page = _page(path, folders)
    try:
        write(folders, page, sort=sort, dashboard=dashboard)
    except LookupError as error:
        if type(error) is not LookupError:  # a fault of ours
            raise
        raise ConfigError(f"mode.sort={sort}", str(error), "mode.sort=<one of these>") from error
    LOGGER.info(f"{len(folders)} run{'' if len(folders) == 1 else 's'} compared by {sort}")
    LOGGER.info(str(page))
    return 0


def find_runs(named: Sequence[str]) -> list[Path]:
    """The run folders that words name, each once.

    Raises:
        ConfigError: A word names none.
    """
    if not named:
        raise ConfigError("mode.runs=[]", "no run is named", "mode.runs=[logs/<name>]")
    found = [folder for word in named for folder in _runs_of(word)]
    return list({folder.resolve(): folder for folder in found}.values())


def _runs_of(word: str) -> list[Path]:
    expanded = str(Path(word).expanduser())
    matches = [Path(expanded)] if Path(expanded).exists() else list(map(Path, glob.glob(expanded)))
    fix = "mode.runs=[<run folders, globs or a sweep's folder>]"
    if not matches:
        raise ConfigError(f"mode.runs=[{word}]", "there is no such folder", fix)
    found = [run for match in sorted(matches) for run in _runs_in(match, depth=2)]
    if not found:
        raise ConfigError(f"mode.runs=[{word}]", "there is no run in it", fix)
    return found


def _runs_in(folder: Path, *, depth: int) -> list[Path]:
    """The folder itself, or those in it: a sweep has them one level below, `logs` two."""
    if _is_run(folder):
        return [folder]
    if depth == 0 or not folder.is_dir():
        return []
    return [run for child in sorted(folder.iterdir()) for run in _runs_in(child, depth=depth - 1)]


def _is_run(folder: Path) -> bool:
    config = folder / CONFIG_FILE
    # one that is still to be composed, as conf/ holds it, is of no run
    is_frozen = config.is_file() and "\ndefaults:" not in config.read_text(errors="replace")
    return is_frozen or any((folder / name).is_file() for name in LEFT_BY_A_RUN)


def _page(path: str | None, folders: Sequence[Path]) -> Path:
    if path is not None:
        named = Path(path).expanduser()
        return named / PAGE if named.is_dir() else named
    parent = Path(commonpath([folder.resolve().parent for folder in folders]))
    if _is_run(parent):
        raise ConfigError(
            "mode.path=null", f"{parent} is a run with a page of its own", "mode.path=<a file>"
        )
    return parent / PAGE
