"""Where the jobs of a sweep run: on this machine, on a cluster. One file an option of conf/launcher/."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from recipes.launcher.job import Job


class Handle(Protocol):
    """A job that has been started."""

    job: Job

    def poll(self) -> int | None:
        """The exit code; None: it has not ended."""
        ...

    def is_waiting(self) -> bool:
        """Whether it stands in the queue of a cluster."""
        ...

    def ask(self, number: int) -> None:
        """Send a signal."""
        ...

    def kill(self) -> None:
        """End it, with all that it has started."""
        ...


class Launcher(Protocol):
    """Starts jobs.

    Attributes:
        max_jobs: At a time; None: as many as fit.
        waits: Whether its jobs are followed to their end.
        is_bounded: Whether it is ever full, so that jobs are asked for when others have ended.
    """

    max_jobs: int | None
    waits: bool
    is_bounded: bool

    def num_devices(self, job: Job) -> int:
        """The devices that a job takes here.

        Raises:
            ConfigError: There are never so many.
        """
        ...

    def words_of(self, job: Job) -> list[str]:
        """What a job's run must be told here, as one types it; its `composed` is there."""
        ...

    def is_full(self) -> bool:
        """Whether not even the smallest job can be started now."""
        ...

    def start(self, waiting: Sequence[Job]) -> list[Handle]:
        """Start those for which there is room, the first ones first."""
        ...

    def log_of(self, job: Job) -> Path:
        """What a job has said."""
        ...

    def describe(self) -> str:
        """In a few words, for the first line."""
        ...
