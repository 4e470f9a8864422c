"""What SLURM says of jobs: its queue, asked every few seconds for all of them, and the exit codes that they leave."""

import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.errors import ConfigError

_ASK_SECONDS = 2.0
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING")
_ENDED = ("COMPLETED", "FAILED")
# ends that are no run's own, as negative exit codes: it can go on
CUT = ("BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
_KILLED = -9
_SILENT_SECONDS = 60.0
_LOST_SECONDS = 10.0  # for a file system to show what another machine has written


class Queue:
    """The jobs whose scripts and exit codes lie in a folder.

    Args:
        folder: Of these.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[str, str] = {}
        self._asked_at = float("-inf")
        self._lost_at: dict[str, float] = {}
        self._names: set[str] = set()
        self._has_answered = False  # when it was last asked

    def those_of(self, names: Sequence[str]) -> set[str]:
        """The jobs that are waiting or running, or have come to an end of their own that nobody has taken in.

        Raises:
            ConfigError: SLURM does not answer: nobody knows whether they run.
        """
        if not names:
            return set()
        self._names |= set(names)
        until = time.monotonic() + _SILENT_SECONDS
        while not self._ask():
            if time.monotonic() > until:
                raise ConfigError(
                    "launcher=slurm",
                    f"squeue does not answer, and {', '.join(names)} may be running",
                    "the same command again when SLURM answers",
                )
            time.sleep(_ASK_SECONDS)
        return {name for name in names if self._is_open(name)}

    def _is_open(self, name: str) -> bool:
        state = self._states[name] if name in self._states else None
        if state is None or state in _ENDED:
            return self._code_of(name) is not None
        return state not in CUT

    def is_waiting(self, name: str) -> bool:
        """Whether a job stands in the queue."""
        return self._state_of(name) in _WAITING

    def worst_exit_code(self, name: str) -> int | None:
        """Of a job that has ended; None: it has not, or will be started again."""
        state = self._state_of(name)
        if not self._has_answered:
            return None
        if state in CUT:
            return _KILLED
        if state is not None and state not in _ENDED:
            self._lost_at.pop(name, None)
            return None
        code = self._code_of(name)
        if code is not None:
            return code
        # ended, or forgotten by SLURM, without a word of the script: not yet, or never
        lost_at = self._lost_at.setdefault(name, time.monotonic())
        if time.monotonic() - lost_at < _LOST_SECONDS:
            return None
        return 0 if state == "COMPLETED" else _KILLED

    def _state_of(self, name: str) -> str | None:
        """SLURM's word; None: it does not know the job, or no more."""
        is_new = name not in self._names
        self._names.add(name)
        if is_new or time.monotonic() - self._asked_at > _ASK_SECONDS:
            self._ask()
        return self._states[name] if name in self._states else None

    def _ask(self) -> bool:
        """Whether SLURM has answered; else the states are those of its last answer."""
        jobs = ",".join(sorted(self._names))
        command = ["squeue", "--states=all", "--array", "--noheader", "--format=%i|%T"]
        asked = subprocess.run(
            [*command, f"--jobs={jobs}"], capture_output=True, text=True, check=False
        )
        self._asked_at = time.monotonic()
        # a single job that it has forgotten is an error, one of several is left out
        self._has_answered = not asked.returncode or "Invalid job id" in asked.stderr
        if not self._has_answered:
            return False  # a controller that is busy or restarts
        pairs = (line.strip().split("|") for line in asked.stdout.splitlines() if "|" in line)
        self._states = {name: state.split()[0] for name, state in pairs}
        return True

    def _code_of(self, name: str) -> int | None:
        """What the batch script has left, as the run's own exit code."""
        try:
            text = (self._folder / f"code_{name}").read_text().strip()
        except FileNotFoundError:
            return None
        if not re.fullmatch(r"\d+", text):
            return None  # half written
        code = int(text)
        if 128 < code < 160:  # by a signal
            return 128 - code
        return code - 100 if code >= 100 else code
