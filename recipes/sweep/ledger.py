"""The jobs of a sweep's folder, each in a `job.json` of its own: what a sweep that goes on finds again."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recipes.compose import Composed
from recipes.mistake import Mistake
from recipes.rank import composed_of, text_of
from recipes.sweep.state import State

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
            told["composed"] = json.loads(text_of(self.composed))
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".tmp")
        with unfinished.open("w") as file:
            file.write(json.dumps(told, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.file)


def read_job(file: Path) -> Job:
    """The job that a `job.json` tells of; its folder is the one that the file lies in.

    Raises:
        Mistake: It is damaged.
    """
    try:
        told: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        remedy = f"rm {file}, and the job is a new one"
        raise Mistake(
            f"hydra.sweep.dir={file.parent.parent}", f"{file} is damaged", remedy
        ) from error
    composed = told.pop("composed")
    job = Job(**told | {"folder": file.parent, "state": State(told["state"])})
    job.composed = None if composed is None else composed_of(json.dumps(composed))
    return job


class Ledger:
    """All jobs of a sweep's folder, those of earlier starts included.

    Args:
        folder: Of the sweep.
    """

    def __init__(self, folder: Path) -> None:
        files = [*folder.glob(f"*/{JOB_FILE}"), *folder.glob(f"*/*/{JOB_FILE}")]
        found = [read_job(file) for file in sorted(files)]
        self.jobs = sorted(found, key=lambda job: job.number)
        self._unclaimed = list(self.jobs)

    def claim(self, overrides: list[str]) -> Job | None:
        """The job of an earlier start that was asked for in the same words, each once; None: there is none."""
        words = sorted(overrides)
        for job in self._unclaimed:
            if sorted(job.overrides) == words:
                self._unclaimed.remove(job)
                return job
        return None

    def free_number(self, wanted: int) -> int:
        """A number that no job has: the one wanted, else the next after all."""
        taken = {job.number for job in self.jobs}
        return wanted if wanted not in taken else max(taken) + 1

    def add(self, job: Job) -> None:
        """Take in a new job."""
        self.jobs.append(job)
