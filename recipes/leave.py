"""The end of a process that has been a rank."""

import atexit
import os
import sys
from typing import NoReturn


def leave(exit_code: int) -> NoReturn:
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
