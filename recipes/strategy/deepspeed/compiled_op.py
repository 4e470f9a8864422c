"""Load DeepSpeed's JIT-compiled operators: one process compiles, and a killed build does not block later ones."""

import contextlib
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any, TextIO

from torch.utils import cpp_extension

LOGGER = logging.getLogger("lightning_recipes")
_LOCK_FILE = "recipes.lock"
_BATON_FILE = "lock"  # created by torch.utils.file_baton
_UNHELD_SECONDS = 180.0  # longer than a build takes: another machine may be building in a shared folder
_POLL_SECONDS = 0.1
_HOW_LONG = "once for this environment: one to two minutes"


def load_op(builder: Any) -> Any:
    """Load an operator, compiled by one process at a time and once for all runs.

    torch 2.13 reserves a build folder with a file named `lock`. A process killed while compiling leaves that file
    behind, and every later process would silently wait forever. Here processes take turns with a kernel lock, which is
    released when its holder exits. The locked file contains the name of the compiling process: a process that acquires
    the lock and finds a name in the file knows that the named process is dead and that `lock` is stale.

    Args:
        builder: DeepSpeed op builder, such as `deepspeed.ops.op_builder.CPUAdamBuilder()`.

    Returns:
        The module that `builder.load()` returns.
    """
    from deepspeed.git_version_info import installed_ops

    if installed_ops.get(builder.name):  # compiled when DeepSpeed was installed
        return builder.load()
    folder = Path(cpp_extension._get_build_directory(builder.name, verbose=False))
    with (folder / _LOCK_FILE).open("a+", encoding="utf-8") as file:
        compiled = folder / f"{builder.name}.so"
        # without the lock, the named process may still be alive
        dead = _read(file) if _lock(file, compiled) else ""
        _clear_baton(folder / _BATON_FILE, dead, builder.name)
        if not compiled.exists():
            LOGGER.info(f"DeepSpeed compiles {builder.name}, {_HOW_LONG}")
        _write(file, f"process {os.getpid()} on {socket.gethostname()}")
        try:
            return builder.load()
        finally:
            _write(file, "")


def _lock(file: TextIO, compiled: Path) -> bool:
    """Wait for the lock; return False if the file system has no locks."""
    try:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if not compiled.exists():
                who = _read(file) or "another process"
                LOGGER.info(f"Waiting for {who}, which compiles {compiled.stem}, {_HOW_LONG}")
            fcntl.lockf(file, fcntl.LOCK_EX)
    except OSError as error:  # compiling without a lock is better than giving up
        LOGGER.warning(f"{file.name} is not locked: {error.strerror}")
        return False
    return True


def _clear_baton(baton: Path, dead: str, name: str) -> None:
    """Remove torch's lock if its owner is dead; wait for it if another program is compiling."""
    if not baton.exists():
        return
    if dead:
        LOGGER.warning(f"{dead} was killed while it compiled {name}: {baton} is removed")
        baton.unlink()
        return
    LOGGER.info(f"Waiting for the program that compiles {name}: it will remove {baton}")
    began = time.monotonic()
    while baton.exists():
        if _is_open(baton):
            began = time.monotonic()
        elif time.monotonic() - began > _UNHELD_SECONDS:
            LOGGER.warning(f"No process of this machine has held {baton} for {_UNHELD_SECONDS:.0f} s: it is removed")
            baton.unlink(missing_ok=True)
            return
        time.sleep(_POLL_SECONDS)


def _is_open(path: Path) -> bool:
    """Return whether a local process of this user has the file open; torch keeps its lock open while compiling."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has exited or belongs to another user
            if os.readlink(link) == str(path.resolve()):
                return True
    return False


def _read(file: TextIO) -> str:
    file.seek(0)
    return file.read().strip()


def _write(file: TextIO, text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()
