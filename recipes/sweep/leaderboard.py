"""`sweep.csv`: the jobs of a sweep, the best first; written anew whenever a job begins or ends."""

import csv
import io
import math
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from recipes.errors import ConfigError
from recipes.launcher.job import Job, State
from recipes.run_folder import METRICS_FILE, read_rows, read_summary, write_atomically

SWEEP_FILE = "sweep.csv"
Direction = Literal["minimize", "maximize"]
_NUMBERS = (
    "val_loss",
    "best_val_loss",
    "train_loss",
    "steps",
    "samples",
    "tokens",
    "seconds",
    "tokens_per_second",
    "mfu",
    "peak_memory_gib",
    "rollbacks",
    "skipped_steps",
    "num_parameters",
)


def check_objective(name: str) -> None:
    """Refuse what no run leaves.

    Raises:
        ConfigError: It is no number of `summary.json`, and no column of `metrics.csv` is called so.
    """
    if name not in _NUMBERS and "/" not in name and name != "lr":
        raise ConfigError(
            f"sweep.objective={name}",
            f"a run leaves no such number; its summary has {' '.join(_NUMBERS)}",
            f"sweep.objective={(get_close_matches(name, _NUMBERS, 1) or ['val_loss'])[0]}",
        )


def read_objective(folder: Path, name: str) -> float | None:
    """What a job is judged by.

    Args:
        folder: Of its run.
        name: A number of `summary.json`, or a column of `metrics.csv`, of which the last value counts.

    Returns:
        None where the run has left no such number, or it is not finite.
    """
    summary = read_summary(folder)
    if summary is None:
        return None
    values = summary if name in summary else _last_values(folder / METRICS_FILE)
    value: Any = values[name] if name in values else None
    return float(value) if value is not None and math.isfinite(value) else None


def ranked(jobs: Sequence[Job], objective: str, direction: Direction) -> list[Job]:
    """The best first; then those without the number, in their order."""

    def key(job: Job) -> tuple[bool, float, int]:
        value = read_objective(job.folder, objective) if job.state is State.FINISHED else None
        if value is None:
            return (True, 0.0, job.number)
        return (False, -value if direction == "maximize" else value, job.number)

    return sorted(jobs, key=key)


def write_leaderboard(
    folder: Path,
    jobs: Sequence[Job],
    *,
    keys: Sequence[str] = (),
    objective: str,
    direction: Direction,
) -> None:
    """Write `sweep.csv`: a row a job, a column a swept word, then the numbers that each has left."""
    swept = swept_words(jobs, keys)
    keys = list(dict.fromkeys(key for words in swept.values() for key in words))
    numbers = [name for name in _NUMBERS if name != objective]
    columns = ["job", "state", "exit_code", *keys, objective, *numbers, "folder", "cluster_job"]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    for job in ranked(jobs, objective, direction):
        summary = read_summary(job.folder) or {}
        row: dict[str, Any] = {"job": job.number, "state": job.state, "folder": job.folder.name}
        row |= {"exit_code": job.exit_code, "cluster_job": job.cluster_job} | swept[job.number]
        row |= {name: summary[name] for name in numbers if name in summary}
        row[objective] = read_objective(job.folder, objective)
        writer.writerow(row)
    write_atomically(folder / SWEEP_FILE, text.getvalue())


def swept_words(jobs: Sequence[Job], keys: Sequence[str] = ()) -> dict[int, dict[str, str]]:
    """By job number, the words that are swept over, by the keys that are known for it, or by differing."""
    typed = {job.number: dict(map(_split, job.overrides)) for job in jobs}
    every = dict.fromkeys(key for words in typed.values() for key in words)
    differs = [
        key
        for key in every
        if key in keys
        or len({words[key] if key in words else None for words in typed.values()}) > 1
    ]
    return {
        number: {key: words[key] for key in differs if key in words}
        for number, words in typed.items()
    }


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def _last_values(path: Path) -> dict[str, float]:
    """Return the newest value of each column of a metrics.csv."""
    last: dict[str, float] = {}
    for row in read_rows(path):
        last |= row
    return last
