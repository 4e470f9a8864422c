"""The jobs of a sweep's folder, each in a `job.json` of its own: what a sweep that goes on finds again."""

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from recipes.config.compose import Composed, from_json, to_json
from recipes.errors import ConfigError
from recipes.run_folder import write_atomically
from recipes.runtime.exit_codes import ExitCode


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


JOB_FILE = "job.json"


@dataclass(kw_only=True)
class Job:
    """One run of a sweep.

    Attributes:
        number: Its place in the sweep.
        folder: Its run folder.
        overrides: What is typed to have it, less what says how the sweep is carried out.
        state: The last that is known of it.
        exit_code: Of its last start; None: it has not ended.
        seconds: From its last start to its end.
        cluster_job: What a cluster calls it; None: it is no cluster's.
        composed: What it runs; None: an earlier start's, which nobody has asked for again.
    """

    number: int
    folder: Path
    overrides: list[str]
    state: State = State.WAITING
    exit_code: int | None = None
    seconds: float | None = None
    cluster_job: str | None = None
    composed: Composed | None = field(default=None, repr=False)

    @property
    def file(self) -> Path:
        """What the job's process starts from."""
        return self.folder / JOB_FILE

    def save(self) -> None:
        """Leave it in its folder, in one piece."""
        told: dict[str, Any] = asdict(self) | {"folder": str(self.folder), "composed": None}
        if self.composed is not None:
            told["composed"] = json.loads(to_json(self.composed))
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, json.dumps(told, indent=1) + "\n", fsync=True)


def read_job(file: Path) -> Job:
    """The job that a `job.json` tells of; its folder is the one that the file lies in.

    Raises:
        ConfigError: It is damaged.
    """
    try:
        told: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        fix = f"rm {file}, and the job is a new one"
        raise ConfigError(
            f"hydra.sweep.dir={file.parent.parent}", f"{file} is damaged", fix
        ) from error
    composed = told.pop("composed")
    job = Job(**told | {"folder": file.parent, "state": State(told["state"])})
    job.composed = None if composed is None else from_json(json.dumps(composed))
    return job


_OF_EXIT_CODES = {
    0: State.FINISHED,
    2: State.REFUSED,
    3: State.DIVERGED,
    ExitCode.OUT_OF_MEMORY: State.OUT_OF_MEMORY,
    ExitCode.PREEMPTED: State.PREEMPTED,
    ExitCode.INTERRUPTED: State.INTERRUPTED,
    ExitCode.TERMINATED: State.INTERRUPTED,
    ExitCode.UNSAVED: State.UNSAVED,
    128 + 9: State.KILLED,  # as a shell tells it
}


def state_from_exit_code(exit_code: int) -> State:
    """The state that a job has ended in; a negative exit code is the signal that killed it."""
    if exit_code < 0:
        return State.KILLED
    return _OF_EXIT_CODES[exit_code] if exit_code in _OF_EXIT_CODES else State.FAILED
