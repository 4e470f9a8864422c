"""A command and every process that it becomes, known by a word in their environment."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from warm_python import MARK_FOLDER

_MARK = "STARTED_BY_A_TEST"


class Started:
    """A running command.

    Args:
        command: Its words.
        folder: Where it runs.
        paths: Where it finds modules beside the installed ones.
        environ: What it finds in its environment beside ours.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        paths: Sequence[Path],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._word = f"{folder.name}_{time.time_ns()}"
        path = os.pathsep.join(str(path) for path in paths)
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ
            | dict(environ or {})
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            | marked(self._word),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, timeout: float = 120.0) -> str:
        return self.process.communicate(timeout=timeout)[0]

    def left(self) -> list[int]:
        """Processes that live, but the first one."""
        return [pid for pid in living(self._word) if pid != self.process.pid]

    def kill(self) -> None:
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


def marked(word: str) -> dict[str, str]:
    """What to add to the environment of a process that `living` shall find."""
    return {_MARK: word}


def living(word: str) -> list[int]:
    """Processes with the word that live, by their environment or, where they are forks, by an open file of its name."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environ = (process / "environ").read_bytes().split(b"\0")
            is_marked = f"{_MARK}={word}".encode() in environ or _holds_file(process, word)
        except OSError:  # it has ended; a zombie has no environment
            continue
        if is_marked:
            found.append(int(process.name))
    return found


def _holds_file(process: Path, word: str) -> bool:
    wanted = str(MARK_FOLDER / word.replace("/", "|"))
    return any(os.readlink(fd) == wanted for fd in (process / "fd").iterdir())
