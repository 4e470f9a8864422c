"""What `sweep.*` says: what the jobs are judged by, and what is made of those that fail."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recipes.sweep.leaderboard import Direction


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `sweep.*` says.

    Args:
        objective: What a job is judged by: a number of `summary.json` or a column of `metrics.csv`.
        direction: Whether less of it is better.
        retry_failed: Whether a sweep that goes on starts again what has failed by itself.
        skip_invalid: Whether the others are carried out where the config of some jobs is wrong.
        compare: Writes the page that compares the runs: `(folders, path, sort=, dashboard=)`; None: no page.
        dashboard: Its sections of panels.
        samples: Of each run, for `${steps_of:${sweep.samples},${global_batch_size}}` where the batch size is swept.
    """

    objective: str
    direction: Direction
    retry_failed: bool
    skip_invalid: bool
    compare: Callable[..., None] | None
    dashboard: list[Any]
    samples: int | None = None
