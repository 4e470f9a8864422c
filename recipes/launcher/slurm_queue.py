"""Track SLURM jobs through squeue, queried for all of them every few seconds, and through their exit code files."""

import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.errors import ConfigError

_QUERY_SECONDS = 2.0
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING")
_ENDED = ("COMPLETED", "FAILED")
# ended from outside: reported as killed, so that the job can resume
_CUT = ("BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
_KILLED = -9
_NO_ANSWER_SECONDS = 60.0  # timeout for squeue to answer
_FILE_DELAY_SECONDS = 10.0  # until a network file system shows an exit code written on another machine


class Queue:
    """Tracks the SLURM jobs of one sweep.

    Args:
        folder: Folder with the jobs' scripts and exit codes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[str, str] = {}
        self._queried_at = float("-inf")
        self._ended_at: dict[str, float] = {}  # job id -> time at which it was first seen ended without an exit code
        self._job_ids: set[str] = set()
        self._has_answered = False  # whether the last query succeeded

    def select_open(self, job_ids: Sequence[str]) -> set[str]:
        """Return the jobs that are waiting or running, or have ended by themselves with an exit code still to be read.

        Raises:
            ConfigError: SLURM does not answer, so it is unknown whether the jobs are running.
        """
        if not job_ids:
            return set()
        self._job_ids |= set(job_ids)
        deadline = time.monotonic() + _NO_ANSWER_SECONDS
        while not self._query():
            if time.monotonic() > deadline:
                raise ConfigError(
                    "launcher=slurm",
                    f"squeue does not answer, and {', '.join(job_ids)} may be running",
                    "the same command again, when SLURM answers",
                )
            time.sleep(_QUERY_SECONDS)
        return {job_id for job_id in job_ids if self._is_open(job_id)}

    def _is_open(self, job_id: str) -> bool:
        state = self._states[job_id] if job_id in self._states else None
        if state is None or state in _ENDED:
            return self._read_exit_code(job_id) is not None
        return state not in _CUT

    def is_waiting(self, job_id: str) -> bool:
        """Return whether a job is waiting in the queue."""
        return self._get_state(job_id) in _WAITING

    def worst_exit_code(self, job_id: str) -> int | None:
        """Return the worst exit code of a job's ranks; None if it has not ended or will restart."""
        state = self._get_state(job_id)
        if not self._has_answered:
            return None
        if state in _CUT:
            return _KILLED
        if state is not None and state not in _ENDED:
            self._ended_at.pop(job_id, None)
            return None
        code = self._read_exit_code(job_id)
        if code is not None:
            return code
        # ended, or forgotten by SLURM, without an exit code file: not visible yet, or never written
        ended_at = self._ended_at.setdefault(job_id, time.monotonic())
        if time.monotonic() - ended_at < _FILE_DELAY_SECONDS:
            return None
        return 0 if state == "COMPLETED" else _KILLED

    def _get_state(self, job_id: str) -> str | None:
        """Return SLURM's name for the job's state; None if SLURM does not know the job, or has forgotten it."""
        is_new = job_id not in self._job_ids
        self._job_ids.add(job_id)
        if is_new or time.monotonic() - self._queried_at > _QUERY_SECONDS:
            self._query()
        return self._states[job_id] if job_id in self._states else None

    def _query(self) -> bool:
        """Update the states through squeue; return whether it answered, otherwise keep the previous states."""
        job_ids = ",".join(sorted(self._job_ids))
        command = ["squeue", "--states=all", "--array", "--noheader", "--format=%i|%T"]
        result = subprocess.run([*command, f"--jobs={job_ids}"], capture_output=True, text=True, check=False)
        self._queried_at = time.monotonic()
        # squeue fails if its only job is forgotten, but omits a forgotten job among several
        self._has_answered = not result.returncode or "Invalid job id" in result.stderr
        if not self._has_answered:
            return False  # the controller is busy or restarting
        pairs = (line.strip().split("|") for line in result.stdout.splitlines() if "|" in line)
        self._states = {job_id: state.split()[0] for job_id, state in pairs}
        return True

    def _read_exit_code(self, job_id: str) -> int | None:
        """Read the exit code file of the batch script (see slurm_script.py) and restore the run's own exit code."""
        try:
            text = (self._folder / f"code_{job_id}").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        if not re.fullmatch(r"\d+", text):
            return None  # partially written
        code = int(text)
        if 128 < code < 160:  # killed by a signal, as reported by a shell
            return 128 - code
        return code - 100 if code >= 100 else code
