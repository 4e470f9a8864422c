"""Lock a run folder for one run at a time. The kernel releases the lock when its holder dies."""

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from recipes.errors import ConfigError
from recipes.files import probe
from recipes.run_folder import HOLDS_LOCK, LOCK_FILE

LOGGER = logging.getLogger("lightning_recipes")
_WAIT_SECONDS = 10.0  # for the remaining processes of a run that has just been killed
_ANNOUNCE_SECONDS = 3.0  # until it is logged that this process waits
_POLL_SECONDS = 0.1


@contextlib.contextmanager
def lock_run_folder(folder: Path, *, setting: str = "hydra.run.dir") -> Iterator[None]:
    """Hold the lock of a run's or a sweep's folder.

    Args:
        folder: Existing folder to lock.
        setting: Config key of that folder, for the error message.

    Raises:
        ConfigError: Another process holds the lock, or the folder cannot be written to, as on a full disk.
    """
    # a POSIX record lock: unlike flock, it is not inherited by loader workers forked from this process,
    # so a worker that outlives its run cannot hold on to the folder
    with _open_lock(folder, setting) as file:
        began, is_announced = time.monotonic(), False
        while not _try_lock(file.fileno()):
            waited = time.monotonic() - began
            file.seek(0)
            holder = file.read().decode().strip()
            if waited > _WAIT_SECONDS:
                raise ConfigError(
                    f"{setting}={folder}",
                    f"another process is using this folder: {holder}",
                    f"{setting}=<another folder>, or end that process",
                )
            if waited > _ANNOUNCE_SECONDS and not is_announced:
                LOGGER.warning("Waiting for %s, which uses %s", holder, folder)
                is_announced = True
            time.sleep(_POLL_SECONDS)
        try:
            probe(folder)  # first: the lock of an earlier start is overwritten without taking space
            file.truncate(0)
            file.write(f"{HOLDS_LOCK} {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            raise _unwritable(folder, setting, error) from error
        yield


def _open_lock(folder: Path, setting: str) -> FileIO:
    try:
        return FileIO(folder / LOCK_FILE, "a+")  # unbuffered: on a full disk a buffer would fail a second time
    except OSError as error:
        raise _unwritable(folder, setting, error) from error


def _unwritable(folder: Path, setting: str, error: OSError) -> ConfigError:
    reason = f"{folder / LOCK_FILE} cannot be written: {error.strerror}"
    return ConfigError(f"{setting}={folder}", reason, f"{setting}=<a folder of yours on a disk with space>")


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:  # a file system without locks: train anyway
        LOGGER.warning("The run's folder is not locked: %s", error.strerror)
    return True
