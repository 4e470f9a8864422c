"""One run at a time in a folder: a lock that the kernel lets go of when its holder dies, however it dies."""

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from recipes.errors import ConfigError

LOGGER = logging.getLogger("lightning_recipes")
LOCK_FILE = ".lock"
_WAIT_SECONDS = 10.0  # for the rest of a run that has just been killed
_POLL_SECONDS = 0.1


@contextlib.contextmanager
def lock_run_folder(folder: Path, *, word: str = "hydra.run.dir") -> Iterator[None]:
    """Hold the folder of a run or a sweep.

    Args:
        folder: Which.
        word: What names it on the command line.

    Raises:
        ConfigError: Another process holds it.
    """
    # a record lock: unlike flock, loader processes forked from this one do not hold it
    with (folder / LOCK_FILE).open("a+") as file:
        until = time.monotonic() + _WAIT_SECONDS
        while not _locked(file.fileno()):
            if time.monotonic() > until:
                file.seek(0)
                raise ConfigError(
                    f"{word}={folder}",
                    f"another process is training in it: {file.read().strip()}",
                    f"{word}=<another folder>, or end that process",
                )
            time.sleep(_POLL_SECONDS)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:  # a file system without locks
        LOGGER.warning("The run's folder is not locked: %s", error.strerror)
    return True
