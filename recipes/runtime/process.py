"""Child processes of a run: their PYTHONPATH, dying with the parent, and exiting."""

import atexit
import gc
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

_EXIT_SECONDS = 60.0  # for the exit functions of a failed rank, such as the upload of its last metrics


def python_path() -> str:
    """Return PYTHONPATH for a child process: this project, then the user's own value."""
    paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))
    return os.pathsep.join(path for path in paths if path)


def die_with_parent() -> None:
    """End this process when its parent dies for any reason.

    The parent holds the write end of this process's standard input, which the kernel closes when the parent dies. The
    parent forwards signals through the same pipe, one byte per signal number: if a cluster signals both processes, it
    counts as one request.
    """
    pipe = os.dup(0)
    # later readers of standard input must not consume these bytes
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)

    def read_signals() -> None:
        while number := os.read(pipe, 1):
            os.kill(os.getpid(), number[0])  # wakes the main thread; `raise_signal` would not
        os._exit(1)

    threading.Thread(target=read_signals, name="die_with_parent", daemon=True).start()


def exit_process(exit_code: int) -> NoReturn:
    """End this process; as a rank, without finalizing the interpreter.

    Gloo's threads release tensors after a collective has ended and need the interpreter for it: a rank whose
    interpreter is being finalized aborts then (pytorch #190489 and #179291, torch 2.13). `atexit` functions still run.
    A failed rank does not wait for its peers: they may be waiting for it in a collective, and torchrun ends them once
    this process exits.
    """
    _flush_streams()
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        gc.freeze()  # finalizing would go through all that the config check has parsed: a third of a second
        sys.exit(exit_code)
    if exit_code:
        timer = threading.Timer(_EXIT_SECONDS, os._exit, [exit_code])
        timer.daemon = True
        timer.start()
        if distributed.get_backend() == "nccl":
            # Lightning destroys the group at exit (2.6.6, `_init_dist_connection`), which for NCCL is a collective;
            # after an abort there is no group left to destroy
            distributed.distributed_c10d._abort_process_group()
    atexit._run_exitfuncs()
    _flush_streams()
    os._exit(exit_code)


def _flush_streams() -> None:
    """Flush the standard streams; where that fails, as on a full disk, the exit code must not become Python's 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed by the shell, `>&-`
            continue
        try:
            stream.flush()
        except ValueError:  # closed by this process
            continue
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
