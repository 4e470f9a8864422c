"""Compose and check a job for the launcher that is to start it. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.config import compose_and_check
from recipes.errors import ConfigError
from recipes.launcher import Launcher
from recipes.launcher.job import Job


def compose_job(
    job: Job, launcher: Launcher, overrides: Sequence[str], *, config_folder: Path, config_name: str
) -> list[ConfigError]:
    """Set `job.composed`, in the folder of the job, with what the launcher adds; return the errors in its config.

    Args:
        job: The job.
        launcher: Starts the job.
        overrides: Overrides of its run.
        config_folder: The folder from which it is composed.
        config_name: The primary config.
    """
    folder = str(job.folder).replace("'", "\\'")
    overrides = [*overrides, f"hydra.run.dir='{folder}'"]
    source: dict[str, Any] = {"config_folder": config_folder, "config_name": config_name}
    job.composed, mistakes = compose_and_check(overrides, **source, continues=True)
    if mistakes or job.composed is None:
        return mistakes
    try:
        # the launcher decides from the composed config, so what it adds needs a second composition
        if extra := launcher.extra_overrides(job):
            job.composed, mistakes = compose_and_check([*overrides, *extra], **source, continues=True)
        if not mistakes:
            launcher.num_devices(job)
    except ConfigError as mistake:
        return [mistake]
    return mistakes
