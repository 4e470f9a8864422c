"""Launchers: run the jobs of a sweep on this machine or on a cluster. One file per option of conf/launcher/."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from recipes.launcher.job import Job


class Launcher(Protocol):
    """Starts jobs.

    Attributes:
        max_jobs: Jobs at a time; None runs as many as fit.
        waits: Whether a sweep follows its jobs until they have ended.
        limits_concurrency: Whether `is_full` can be true: the next jobs are then chosen only after others have ended.
    """

    max_jobs: int | None
    waits: bool
    limits_concurrency: bool

    def num_devices(self, job: Job) -> int:
        """Return the number of devices that a job needs with this launcher.

        Raises:
            ConfigError: This launcher can never provide that many, or the config does not specify the number.
        """
        ...

    def extra_overrides(self, job: Job) -> list[str]:
        """Return the overrides that this launcher adds to a composed job."""
        ...

    def is_full(self) -> bool:
        """Return whether not even the smallest job can start now."""
        ...

    def start(self, waiting: Sequence[Job]) -> list["Handle"]:
        """Start the jobs that fit, in order."""
        ...

    def log_path(self, job: Job) -> Path:
        """Return the file with the console output of a job."""
        ...

    def describe(self) -> str:
        """Return a short text for the first line of a sweep, such as `on 4 GPUs`."""
        ...


class Handle(Protocol):
    """A job that has been started."""

    job: Job

    def poll(self) -> int | None:
        """Return the exit code; None while the job has not ended."""
        ...

    def is_waiting(self) -> bool:
        """Return whether the job is waiting in the queue of a cluster."""
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal to the job."""
        ...

    def kill(self) -> None:
        """Kill the job and all processes that it has started."""
        ...
