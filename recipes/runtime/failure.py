"""How a rank failed, left in a file for whoever started it: torch elastic's format, so that torchrun reads it too."""

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.run_folder import OOM_FOLDER, write_atomically

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's word for where a rank leaves its error
STACK = ".stack"  # beside it: where the interpreter leaves its stack at a segmentation fault
# What gloo, NCCL and the store say in a rank whose peer is gone
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process exited|unhandled system error"
    r"|failed to recv, got 0 bytes|communicator was aborted|socket closed",
    re.IGNORECASE,
)
# what allocators, CUDA's libraries, NCCL, Triton and the kernel say
_OUT_OF_MEMORY = re.compile(
    r"out of memory|_ALLOC_FAILED|can't allocate memory|Cannot allocate memory", re.IGNORECASE
)
_FROM_TORCH = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank ended.

    Attributes:
        exit_code: What the rank ends with.
        message: One line.
        report: What a person should read: a traceback, or the mistakes in the config.
        time: Seconds since the epoch.
        by_peer: Whether it only lost its connection to another rank, which failed first.
    """

    exit_code: int
    message: str
    report: str
    time: float
    by_peer: bool = False


def error_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where this process leaves its error; None: nobody will read it."""
    named = environ.get(ERROR_FILE)
    return Path(named) if named else None


def is_peer_failure(error: BaseException | None) -> bool:
    """Whether an exception, or one behind it, says that another rank is gone."""
    while error is not None:
        if type(error).__name__ in _FROM_TORCH and _LOST_PEER.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one behind it, says that memory is full: of a device or of the host."""
    while error is not None:
        if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def read_peer_error(run_folder: Path) -> dict[str, Any] | None:
    """What another rank than the first has left when its memory was full; None: nothing whole."""
    for path in sorted((run_folder / OOM_FOLDER).glob("rank_*.json")):
        with contextlib.suppress(OSError, json.JSONDecodeError):
            told: dict[str, Any] = json.loads(path.read_text())
            if told["rank"] > 0:
                return told
    return None


def write_failure(failure: Failure, file: Path) -> None:
    """Leave it in one piece: a reader sees the whole file or none."""
    told = {
        "message": {
            "message": failure.message,
            "extraInfo": {"py_callstack": failure.report, "timestamp": str(int(failure.time))},
        },
        "time": failure.time,
        "exit_code": failure.exit_code,
        "by_peer": failure.by_peer,
    }
    write_atomically(file, json.dumps(told))


def read_failure(file: Path) -> Failure | None:
    """What a rank left; None where it left nothing."""
    if not file.is_file():
        return None
    told: dict[str, Any] = json.loads(file.read_text())
    return Failure(
        exit_code=told["exit_code"],
        message=told["message"]["message"],
        report=told["message"]["extraInfo"]["py_callstack"],
        time=told["time"],
        by_peer=told["by_peer"],
    )


def make_failure(error: BaseException, *, exit_code: int, report: str) -> Failure:
    """The failure that an exception is, now."""
    return Failure(
        exit_code=exit_code,
        message=f"{type(error).__name__}: {error}",
        report=report,
        time=time.time(),
        by_peer=is_peer_failure(error),
    )
