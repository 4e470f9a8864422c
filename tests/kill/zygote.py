"""One process that has imported all that a run imports, and forks the ranks of a run on request: milliseconds a start.

`python -P zygote.py`, started by `lives.Zygote`. A request is a line of JSON on standard input, its response a line on
standard output; when the input closes, whatever still runs is killed.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PR_SET_PDEATHSIG = 1
# imported lazily by a run, in addition to what its config names; other versions may have no such module
_LATE = (
    "recipes.build",
    "recipes.entry.run",
    "recipes.entry.rank_main",
    "recipes.entry.spawn",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "multiprocessing.popen_fork",
    "multiprocessing.synchronize",
    "safetensors.torch",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)


class Ranks:
    """The children of this process: ranks, and the orphans of killed ranks."""

    def __init__(self) -> None:
        self._running: list[int] = []
        self._pipes: dict[int, int] = {}  # rank's pid -> write end of its standard input

    def warm(self, modules: Sequence[str]) -> list[int]:
        """Import modules; return the number of threads, which must be 1 where a process forks."""
        for name in (*_LATE, *modules):
            try:
                importlib.import_module(name)
            except ImportError:
                if name.startswith(("recipes", "callbacks")):
                    raise
        gc.collect()
        gc.freeze()  # a child's garbage collector then leaves these pages shared
        return [len(list(Path("/proc/self/task").iterdir()))]

    def start(self, run_file: str, environs: list[dict[str, str]], logs: list[str]) -> list[int]:
        """Fork one child per rank; return their process ids."""
        started = []
        for environ, log in zip(environs, logs, strict=True):
            read_end, write_end = os.pipe()
            pid = os.fork()
            if not pid:
                _become_rank(run_file, environ, log, read_end)
            os.close(read_end)
            self._pipes[pid] = write_end
            started.append(pid)
        self._running += started
        return started

    def wait(self, pids: list[int]) -> list[int]:
        """Wait for ranks to end; return their exit codes, negative where a signal ended them."""
        codes = []
        for pid in pids:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            self._running.remove(pid)
            os.close(self._pipes.pop(pid))
        return codes

    def end(self) -> list[int]:
        """Kill every child, and every orphan as it is reparented to this process."""
        while children := self._children():
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self._running.clear()
        return []

    def _children(self) -> list[int]:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        return [int(pid) for pid in text.split()]


def _become_rank(run_file: str, environ: dict[str, str], log: str, stdin: int) -> NoReturn:
    """Do what a fresh process of `train.py` or `entry.spawn` does once its run is composed."""
    exit_code = 70  # of an exception, whose traceback is printed
    try:
        os.setpgid(0, 0)
        os.environ.update(environ)
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for source, target in ((stdin, 0), (opened, 1), (opened, 2)):
            os.dup2(source, target)
        os.closerange(3, 256)  # pipes of other ranks, which would keep those alive
        exit_code = _run(run_file)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _run(run_file: str) -> int:
    from recipes.config.resolved import from_json
    from recipes.entry import rank_main
    from recipes.entry.run import run_resolved
    from recipes.runtime.world import RANK_FILE

    if RANK_FILE in os.environ:
        return rank_main.main()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ranks notice a dead parent by their standard input
    return run_resolved(from_json(Path(run_file).read_text()))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def main() -> None:
    ranks = Ranks()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        response = getattr(ranks, request.pop("do"))(**request)
        print(json.dumps(response), flush=True)
    ranks.end()


if __name__ == "__main__":
    main()
