"""Jobs of a sweep; each has a `job.json` in its run folder, from which a resumed sweep restores it."""

import json
import re
import signal
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from recipes.config.resolved import ResolvedRun, from_json, to_json
from recipes.errors import ConfigError
from recipes.files import write_atomically
from recipes.runtime.exit_codes import ExitCode

JOB_FILE = "job.json"
CLUSTER_JOB = re.compile(r"\d+(_\d+)?")


class State(StrEnum):
    """State of a job, as the table and `sweep.csv` show it."""

    WAITING = "waiting"
    QUEUED = "queued"  # in the queue of a cluster
    RUNNING = "running"
    FINISHED = "finished"
    PRUNED = "pruned"  # stopped by the sweeper in favor of better jobs
    REFUSED = "refused"  # invalid config
    DIVERGED = "diverged"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    PREEMPTED = "preempted"  # after saving a checkpoint
    KILLED = "killed"
    UNSAVED = "unsaved"  # not started, or finished without its last checkpoint: files could not be written

    @property
    def is_over(self) -> bool:
        """Whether the job has completed and has a result."""
        return self in (State.FINISHED, State.PRUNED)

    @property
    def has_failed(self) -> bool:
        """Whether the job failed for a reason of its own, so that it would fail again."""
        return self in (State.REFUSED, State.DIVERGED, State.OUT_OF_MEMORY, State.FAILED)

    @property
    def is_cut(self) -> bool:
        """Whether the job was ended from outside and can resume, including jobs running when their sweep was killed."""
        return self in (
            State.QUEUED,
            State.RUNNING,
            State.UNSAVED,
            State.INTERRUPTED,
            State.PREEMPTED,
            State.KILLED,
        )


_STATE_BY_EXIT_CODE: dict[int, State] = {
    ExitCode.FINISHED: State.FINISHED,
    ExitCode.INVALID_CONFIG: State.REFUSED,
    ExitCode.DIVERGED: State.DIVERGED,
    ExitCode.OUT_OF_MEMORY: State.OUT_OF_MEMORY,
    ExitCode.UNSAVED: State.UNSAVED,
    ExitCode.PREEMPTED: State.PREEMPTED,
    ExitCode.INTERRUPTED: State.INTERRUPTED,
    ExitCode.TERMINATED: State.INTERRUPTED,
    128 + signal.SIGKILL: State.KILLED,  # as a shell reports it
}


def state_from_exit_code(exit_code: int) -> State:
    """Return the state of a job that has ended; a negative exit code is the signal that killed it."""
    if exit_code < 0:
        return State.KILLED
    known = exit_code in _STATE_BY_EXIT_CODE
    return _STATE_BY_EXIT_CODE[exit_code] if known else State.FAILED


@dataclass(kw_only=True)
class Job:
    """One run of a sweep.

    Attributes:
        number: Index in the sweep.
        folder: Run folder.
        overrides: Overrides that reproduce it, without those that concern the execution of the sweep.
        state: Last known state.
        exit_code: Exit code of its last start; None until it ends.
        seconds: Duration of its last start; None until it ends.
        cluster_job: Job id on the cluster; None if it does not run on one.
        composed: Its run; None for a job of an earlier start that the sweep no longer contains.
    """

    number: int
    folder: Path
    overrides: list[str]
    state: State = State.WAITING
    exit_code: int | None = None
    seconds: float | None = None
    cluster_job: str | None = None
    composed: ResolvedRun | None = field(default=None, repr=False)

    @property
    def file(self) -> Path:
        """Path of `job.json`, which the process of the job reads."""
        return self.folder / JOB_FILE

    def save(self) -> None:
        """Write `job.json` atomically.

        Raises:
            OSError: The disk is full or the folder cannot be written to.
        """
        fields: dict[str, Any] = asdict(self) | {"folder": str(self.folder), "composed": None}
        if self.composed is not None:
            fields["composed"] = json.loads(to_json(self.composed))
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, json.dumps(fields, indent=1) + "\n", fsync=True)


def read_job(file: Path) -> Job:
    """Read a `job.json`; its parent is the job's folder, so that a sweep can be moved.

    Raises:
        ConfigError: The file is damaged.
    """
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        composed = fields.pop("composed")
        texts = fields["overrides"]
        if type(fields["number"]) is not int or type(texts) is not list or not all(type(text) is str for text in texts):
            raise ValueError("its number or overrides are of another type")
        if not (fields["cluster_job"] is None or CLUSTER_JOB.fullmatch(fields["cluster_job"])):
            raise ValueError(f"{fields['cluster_job']!r} is not a job id")  # it becomes part of a file name
        job = Job(**fields | {"folder": file.parent, "state": State(fields["state"])})
        job.composed = None if composed is None else from_json(json.dumps(composed))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:  # not JSON, or other fields
        raise ConfigError(
            str(file),
            f"the file of a job is damaged: {error}",
            f"rm {file}, and the same command; the job starts again as a new one",
        ) from error
    return job
