"""What becomes of a job of a sweep, and what a sweep that goes on does with it."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

from recipes.out_of_memory import EXIT_OUT_OF_MEMORY
from recipes.preemption import EXIT_PREEMPTED
from recipes.start_ranks import EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_UNSAVED

SUMMARY_FILE = "summary.json"


class State(StrEnum):
    """A job's, by the word that the table and `sweep.csv` show."""

    WAITING = "waiting"
    QUEUED = "queued"  # in that of a cluster
    RUNNING = "running"
    FINISHED = "finished"
    PRUNED = "pruned"  # stopped by the sweeper: others were better at the same step
    REFUSED = "refused"  # the config is wrong
    DIVERGED = "diverged"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    PREEMPTED = "preempted"  # after saving
    KILLED = "killed"
    UNSAVED = "unsaved"  # finished, but for its last checkpoint: a full disk

    @property
    def is_over(self) -> bool:
        """It has the result that was asked for."""
        return self in (State.FINISHED, State.PRUNED)

    @property
    def has_failed(self) -> bool:
        """By itself: it would again."""
        return self in (State.REFUSED, State.DIVERGED, State.OUT_OF_MEMORY, State.FAILED)

    @property
    def is_cut(self) -> bool:
        """From outside: it can go on. One that was running when its sweep was killed is."""
        return self in (
            State.QUEUED,
            State.RUNNING,
            State.UNSAVED,
            State.INTERRUPTED,
            State.PREEMPTED,
            State.KILLED,
        )


_OF_EXIT_CODES = {
    0: State.FINISHED,
    2: State.REFUSED,
    3: State.DIVERGED,
    EXIT_OUT_OF_MEMORY: State.OUT_OF_MEMORY,
    EXIT_PREEMPTED: State.PREEMPTED,
    EXIT_INTERRUPTED: State.INTERRUPTED,
    EXIT_TERMINATED: State.INTERRUPTED,
    EXIT_UNSAVED: State.UNSAVED,
    128 + 9: State.KILLED,  # as a shell tells it
}


def state_of(exit_code: int) -> State:
    """The state that a job has ended in; a negative exit code is the signal that killed it."""
    if exit_code < 0:
        return State.KILLED
    return _OF_EXIT_CODES[exit_code] if exit_code in _OF_EXIT_CODES else State.FAILED


def summary_of(folder: Path) -> dict[str, Any] | None:
    """What a run has left of itself at its end; None: nothing."""
    path = folder / SUMMARY_FILE
    if not path.is_file():
        return None
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary
