"""A process that ends with the one that started it, however that one dies; signals come through the same pipe."""

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn


def die_with_parent() -> None:
    """End this process when the parent's end of our standard input closes.

    What the parent writes there is the number of a signal: a cluster that signals both of us asks once.
    """
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        while told := os.read(pipe, 1):
            os.kill(os.getpid(), told[0])  # wakes the main thread, where `raise_signal` would not
        os._exit(1)

    threading.Thread(target=wait, name="die_with_parent", daemon=True).start()


def exit_process(exit_code: int) -> NoReturn:
    """End this process; a rank without taking the interpreter down.

    Gloo's threads let go of tensors after a collective has ended, for which they need the interpreter: a rank that is
    just being taken down aborts then (pytorch #190489 and #179291, torch 2.13). What is registered for the end is done.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        sys.exit(exit_code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def python_path() -> str:
    """This project first, then what the person set."""
    paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))
    return os.pathsep.join(path for path in paths if path)
