"""What a person sees while a sweep goes on: a live table in a terminal, else a line whenever a job begins or ends."""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from recipes.launcher.job import Job, State
from recipes.runtime.console import LOGGER
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


class LiveTable:
    """The jobs of a sweep, those that matter now first.

    Args:
        console: Where; no terminal: nothing is shown but what the log says.
        jobs: All there are; the list may grow.
        swept: By job number, what sets it apart.
    """

    def __init__(
        self, console: Console, jobs: Sequence[Job], swept: Callable[[], dict[int, dict[str, str]]]
    ) -> None:
        self._swept = swept
        self._jobs = jobs
        self._shown_at = 0.0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "LiveTable":
        if self._live is not None:
            self._live.__enter__()
            _log_to_stdout()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
            _log_to_stdout()

    def show(self, progress: Mapping[int, Progress], *, now: bool = False) -> None:
        """Draw it anew, twice a second at most.

        Args:
            progress: By job number, of those that run.
            now: Even if it has just been drawn.
        """
        if self._live is None or (not now and time.monotonic() - self._shown_at < _REFRESH_SECONDS):
            return
        self._shown_at = time.monotonic()
        self._live.update(table_of(self._jobs, self._swept(), progress), refresh=True)


def table_of(
    jobs: Sequence[Job], words: Mapping[int, Mapping[str, str]], progress: Mapping[int, Progress]
) -> Table:
    """The table as it is now; of many jobs those that run, then the newest that have ended, then the next."""
    shown = sorted(jobs, key=lambda job: (_weight(job), -job.number if job.seconds else job.number))
    shown = sorted(shown[:_MAX_ROWS], key=lambda job: job.number)
    keys = list(dict.fromkeys(key for one in words.values() for key in one))
    table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
    for name in ("job", *keys, "state"):
        table.add_column(name, overflow="fold")
    for name in ("step", "loss", "val", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for job in shown:
        mine = words[job.number] if job.number in words else {}
        cells = [mine[key] if key in mine else "" for key in keys]
        numbers = _numbers(progress[job.number] if job.number in progress else None, job)
        state = Text(job.state, style=_STYLES[job.state] if job.state in _STYLES else "red")
        # as text: [a] is no markup
        table.add_row(str(job.number), *map(Text, cells), state, *numbers)
    counts = {state: sum(job.state is state for job in jobs) for state in State}
    table.caption = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return table


def time_text(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _log_to_stdout() -> None:
    """What is standard output now: above the table while there is one."""
    for handler in LOGGER.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stdout)


def _weight(job: Job) -> int:
    if job.state is State.RUNNING:
        return 0
    return 2 if job.state in (State.WAITING, State.QUEUED) else 1


def _numbers(progress: Progress | None, job: Job) -> list[str]:
    """Step, training loss, validation loss, time left or taken."""
    if progress is None:
        return ["", "", "", "" if job.seconds is None else time_text(job.seconds)]
    last = progress.last
    of = "" if progress.max_steps is None else f"/{progress.max_steps}"
    losses = [f"{last[name]:.4f}" if name in last else "" for name in ("train/loss", "val/loss")]
    left = progress.seconds_left()
    taken = "" if job.seconds is None else time_text(job.seconds)
    when = taken if job.exit_code is not None else "" if left is None else time_text(left)
    return [f"{progress.step}{of}", *losses, when]
