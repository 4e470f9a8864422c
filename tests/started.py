"""A command and every process that it starts, identified by a mark in their environment."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from warm_python import MARK_FOLDER

_VARIABLE = "STARTED_BY_A_TEST"


class Started:
    """A running command.

    Args:
        command: Program and arguments.
        folder: Working directory.
        paths: Folders to add to PYTHONPATH.
        environ: Additional environment variables.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        paths: Sequence[Path],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._mark = f"{folder.name}_{time.time_ns()}"
        path = os.pathsep.join(str(path) for path in paths)
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | dict(environ or {}) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | marked(self._mark),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, timeout: float = 300.0) -> str:
        """Wait until the command exits; return its output."""
        return self.process.communicate(timeout=timeout)[0]

    def left(self) -> list[int]:
        """Return the processes still running, except the first one."""
        return [pid for pid in living(self._mark) if pid != self.process.pid]

    def kill(self) -> None:
        """Kill all processes."""
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


def marked(mark: str) -> dict[str, str]:
    """Return the variables by which `living` finds a process and its descendants."""
    return {_VARIABLE: mark}


def living(mark: str) -> list[int]:
    """Return running processes with a mark: in the environment or, for forks, in the name of an open file."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environ = (process / "environ").read_bytes().split(b"\0")
            is_marked = f"{_VARIABLE}={mark}".encode() in environ or _holds_file(process, mark)
        except OSError:  # the process has exited; a zombie has no environment
            continue
        if is_marked:
            found.append(int(process.name))
    return found


def _holds_file(process: Path, mark: str) -> bool:
    wanted = str(MARK_FOLDER / mark.replace("/", "|"))
    return any(os.readlink(fd) == wanted for fd in (process / "fd").iterdir())
