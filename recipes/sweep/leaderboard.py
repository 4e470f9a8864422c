"""`sweep.csv`: the jobs of a sweep, best first; rewritten whenever a job starts or ends."""

import csv
import io
import math
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from recipes.config.check.metrics import find_wrong_direction
from recipes.errors import ConfigError
from recipes.files import write_atomically
from recipes.launcher.job import Job, State
from recipes.run_folder import METRICS_FILE, SWEEP_FILE, read_rows, read_summary
from recipes.runtime.console import LOGGER

Direction = Literal["minimize", "maximize"]
_SUMMARY_NUMBERS = (
    "val_loss",
    "best_val_loss",
    "train_loss",
    "steps",
    "samples",
    "tokens",
    "seconds",
    "tokens_per_second",
    "samples_per_second",
    "mfu",
    "peak_memory_gib",
    "rollbacks",
    "skipped_steps",
    "num_parameters",
)

_TYPO = 0.9  # similarity of a name to one that it is taken for
# the metric that is logged during the run for a number of summary.json
LOGGED_METRICS = {"best_val_loss": "val/loss", "val_loss": "val/loss", "train_loss": "train/loss"}


def check_objective(
    name: str, direction: Direction = "minimize", *, logs_anything: bool = False, has_val_loss: bool = True
) -> None:
    """Check that a run can have this objective, and warn if its worst value would rank first.

    Args:
        name: A key of `summary.json` or a column of `metrics.csv`.
        direction: Whether it is minimized or maximized.
        logs_anything: Whether a run has parts of somebody's own, which name what they log as they like.
        has_val_loss: Whether validation computes the loss: completions have none.

    Raises:
        ConfigError: It is neither, or no run will have it.
    """
    if LOGGED_METRICS.get(name) == "val/loss" and not has_val_loss:
        fix = "sweep.objective=val/reward sweep.direction=maximize"
        raise ConfigError(f"sweep.objective={name}", "validation of completions computes no loss", fix)
    is_of_module = logs_anything and not get_close_matches(name, _SUMMARY_NUMBERS, 1, cutoff=_TYPO)
    if name not in _SUMMARY_NUMBERS and "/" not in name and name != "lr" and not is_of_module:
        raise ConfigError(
            f"sweep.objective={name}",
            f"no run has this metric; a summary has {' '.join(_SUMMARY_NUMBERS)}",
            f"sweep.objective={(get_close_matches(name, _SUMMARY_NUMBERS, 1) or ['val_loss'])[0]}",
        )
    if mistake := find_wrong_direction("sweep.objective", name, "sweep.direction", direction):
        LOGGER.warning(str(mistake))


def read_objective(folder: Path, name: str) -> float | None:
    """Return the objective of a run; None if the run has not written it, or it is NaN or inf.

    Args:
        folder: The run folder.
        name: A key of `summary.json`, or a column of `metrics.csv`, whose last value is used.
    """
    value = _find_objective(folder, name)
    return float(value) if value is not None and math.isfinite(value) else None


def list_objectives(folder: Path) -> list[str]:
    """Return the metrics of validation that a run has logged, any of which may be the objective."""
    return [name for name in _last_values(folder / METRICS_FILE) if name.startswith("val")]


def has_objective(folder: Path, name: str) -> bool:
    """Return whether the run has written the objective, as a number, NaN or inf; a summary has null for the latter."""
    logged_as = LOGGED_METRICS.get(name)
    return _find_objective(folder, name) is not None or logged_as in _last_values(folder / METRICS_FILE)


def _find_objective(folder: Path, name: str) -> float | None:
    summary = read_summary(folder)
    if summary is None:
        return None
    values = summary if name in summary else _last_values(folder / METRICS_FILE)
    value: Any = values.get(name)
    return None if value is None else float(value)


def rank_jobs(jobs: Sequence[Job], objective: str, direction: Direction) -> list[Job]:
    """Return the jobs, best first; those that are not finished or lack the objective come last."""

    def sort_key(job: Job) -> tuple[bool, float, int]:
        value = read_objective(job.folder, objective) if job.state is State.FINISHED else None
        if value is None:
            return (True, 0.0, job.number)
        return (False, -value if direction == "maximize" else value, job.number)

    return sorted(jobs, key=sort_key)


def write_leaderboard(
    folder: Path,
    jobs: Sequence[Job],
    *,
    keys: Sequence[str] = (),
    objective: str,
    direction: Direction,
) -> None:
    """Write `sweep.csv`: one row per job with its swept overrides and summary values.

    Args:
        folder: The sweep's folder.
        jobs: All jobs of the sweep.
        keys: The keys that are swept over, if known.
        objective: Value to sort the rows by, in the first column of results.
        direction: Whether the objective is minimized or maximized.

    Raises:
        OSError: The file cannot be written.
    """
    swept = swept_overrides(jobs, keys)
    keys = list(dict.fromkeys(key for overrides in swept.values() for key in overrides))
    numbers = [name for name in _SUMMARY_NUMBERS if name != objective]
    columns = ["job", "state", "exit_code", *keys, objective, *numbers, "folder", "cluster_job"]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    for job in rank_jobs(jobs, objective, direction):
        summary = read_summary(job.folder) or {}
        row: dict[str, Any] = {"job": job.number, "state": job.state, "folder": job.folder.name}
        row |= {"exit_code": job.exit_code, "cluster_job": job.cluster_job} | swept[job.number]
        row |= {name: summary[name] for name in numbers if name in summary}
        row[objective] = read_objective(job.folder, objective)
        writer.writerow(row)
    write_atomically(folder / SWEEP_FILE, text.getvalue())


def swept_overrides(jobs: Sequence[Job], keys: Sequence[str] = ()) -> dict[int, dict[str, str]]:
    """Return the overrides that set each job apart: job number -> key -> value.

    Args:
        jobs: All jobs of the sweep.
        keys: Keys known to be swept over; every key whose value differs between jobs is added.
    """
    by_job = {job.number: dict(map(_split, job.overrides)) for job in jobs}
    all_keys = dict.fromkeys(key for overrides in by_job.values() for key in overrides)
    swept = [key for key in all_keys if key in keys or len({overrides.get(key) for overrides in by_job.values()}) > 1]
    return {number: {key: overrides[key] for key in swept if key in overrides} for number, overrides in by_job.items()}


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def _last_values(path: Path) -> dict[str, float]:
    """Return the last value of each column of a `metrics.csv`."""
    last: dict[str, float] = {}
    for row in read_rows(path):
        last |= row
    return last
