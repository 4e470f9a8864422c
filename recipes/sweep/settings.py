"""The settings of `sweep.*`: how jobs are ranked, and how failed or invalid jobs are handled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of `sweep.*`.

    Args:
        objective: Value that ranks jobs: a key of `summary.json` or a column of `metrics.csv`.
        direction: Whether the objective is minimized or maximized.
        retry_failed: Whether a resumed sweep restarts jobs that failed on their own.
        skip_invalid: Whether the valid jobs run when the config of others is invalid.
        compare: Writes the comparison page: `(folders, path, sort=, dashboard=)`; None disables the page.
        dashboard: The sections of panels on that page.
        samples: Samples per run, for `${steps_of:${sweep.samples},${global_batch_size}}` when the batch size is swept.
    """

    objective: str
    direction: Literal["minimize", "maximize"]  # not by an alias: the config check reads this annotation
    retry_failed: bool
    skip_invalid: bool
    compare: Callable[..., None] | None
    dashboard: list[Any] | None
    samples: Annotated[int, ">= 1"] | None = None
