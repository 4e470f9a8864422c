"""The live table of a running sweep; without a terminal only the log lines of each job are printed."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from recipes.launcher.job import Job, State
from recipes.runtime.console import LOGGER, ConsoleHandler
from recipes.sweep.progress import Progress

_MAX_ROWS = 24
_REFRESH_SECONDS = 0.5
_STYLES = {
    State.WAITING: "dim",
    State.QUEUED: "dim",
    State.RUNNING: "bold",
    State.FINISHED: "green",
    State.PRUNED: "yellow",
    State.INTERRUPTED: "yellow",
    State.PREEMPTED: "yellow",
}
_OF_POLICIES = ("reward/mean", "val/reward")


class LiveTable:
    """A table of the jobs of a sweep, updated in place.

    Args:
        console: Where to draw; nothing is drawn unless it is a terminal.
        jobs: All jobs; the list may grow.
        get_swept_values: Returns the values that set each job apart, by job number.
    """

    def __init__(
        self,
        console: Console,
        jobs: Sequence[Job],
        get_swept_values: Callable[[], dict[int, dict[str, str]]],
    ) -> None:
        self._jobs = jobs
        self._get_swept_values = get_swept_values
        self._progress: Mapping[int, Progress] = {}
        self._drawn_at = 0.0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Show the table on the terminal until the block ends."""
        if self._live is None:
            yield
            return
        try:
            with self._live:
                _log_to_stdout()
                yield
                self._draw()  # what has ended since it was drawn last
        finally:
            _log_to_stdout()

    def show(self, progress: Mapping[int, Progress]) -> None:
        """Draw the table, at most twice a second.

        Args:
            progress: Progress of the jobs this command has started, by job number.
        """
        self._progress = progress
        if time.monotonic() - self._drawn_at >= _REFRESH_SECONDS:
            self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        self._drawn_at = time.monotonic()
        self._live.update(make_table(self._jobs, self._get_swept_values(), self._progress), refresh=True)


def make_table(
    jobs: Sequence[Job],
    swept_values: Mapping[int, Mapping[str, str]],
    progress: Mapping[int, Progress],
) -> Table:
    """Return the table: of many jobs the running ones, then the last that ended, then the next to start."""
    shown = sorted(sorted(jobs, key=_priority)[:_MAX_ROWS], key=lambda job: job.number)
    keys = list(dict.fromkeys(key for values in swept_values.values() for key in values))
    table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
    for name in ("job", *keys, "state"):
        table.add_column(name, overflow="fold")
    # validation of completions computes no loss, and that of training says nothing
    is_policy = any(_OF_POLICIES[0] in each.last for each in progress.values())
    names = _OF_POLICIES if is_policy else ("train/loss", "val/loss")
    for name in ("step", "reward" if is_policy else "loss", "val", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for job in shown:
        values = swept_values.get(job.number, {})
        # Text, so that [a] is not read as markup
        cells = [Text(values.get(key, "")) for key in keys]
        state = Text(job.state, style=_STYLES.get(job.state, "red"))
        table.add_row(str(job.number), *cells, state, *_metrics(job, progress.get(job.number), names))
    counts = Counter(job.state for job in jobs)
    table.caption = ", ".join(f"{counts[state]} {state}" for state in State if counts[state])
    return table


def format_seconds(seconds: float) -> str:
    """Return `1:02:03` or `2:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _log_to_stdout() -> None:
    """Point the console's handler at the current stdout, which Live replaces so that lines appear above the table."""
    for handler in LOGGER.handlers:
        if isinstance(handler, ConsoleHandler):
            handler.setStream(sys.stdout)


def _priority(job: Job) -> tuple[int, int]:
    """Return the sort key of the jobs to show: running, ended (newest first), waiting."""
    groups = {State.RUNNING: 0, State.WAITING: 2, State.QUEUED: 2}
    return groups.get(job.state, 1), -job.number if job.seconds else job.number


def _metrics(job: Job, progress: Progress | None, names: Sequence[str]) -> list[str]:
    """Return the cells for step, metrics of training and validation, and time left or, after the end, taken."""
    seconds = job.seconds if progress is None or job.exit_code is not None else progress.seconds_left()
    duration = "" if seconds is None else format_seconds(seconds)
    if progress is None:
        return ["", "", "", duration]
    total = "" if progress.max_steps is None else f"/{progress.max_steps}"
    found = [f"{progress.last[name]:.4f}" if name in progress.last else "" for name in names]
    step = f"{progress.step}{total}" if progress.step or total else ""  # a mode that does not train has none
    return [step, *found, duration]
