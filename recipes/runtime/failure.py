"""Why a rank failed, written to a file for the process that started it, in the format torchrun reads too."""

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

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's variable for the path of a rank's error file
STACK_SUFFIX = ".stack"  # file alongside it: Python's stack at a segmentation fault
# messages of gloo, NCCL and the store on a rank whose peer is gone
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process exited|unhandled system error"
    r"|failed to recv, got 0 bytes|communicator was aborted|socket closed",
    re.IGNORECASE,
)
# messages of allocators, CUDA's libraries, NCCL, Triton and the kernel; callbacks/memory has an equal copy
_OUT_OF_MEMORY = re.compile(r"out of memory|_ALLOC_FAILED|can(no|')t allocate memory", re.IGNORECASE)
_HOST_OUT_OF_MEMORY = ("DefaultCPUAllocator", "Cannot allocate memory")
_TORCH_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank ended.

    Attributes:
        exit_code: Exit code of the rank.
        message: One line.
        report: Text to show: a traceback, or the mistakes in the config.
        time: Seconds since the epoch.
        by_peer: Whether it only lost its connection to another rank, which failed first.
    """

    exit_code: int
    message: str
    report: str
    time: float
    by_peer: bool = False


def get_error_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where this process writes its failure; None if nobody will read it."""
    path = environ.get(ERROR_FILE)
    return Path(path) if path else None


def is_peer_failure(error: BaseException | None) -> bool:
    """Return whether an exception, or one of its causes, says that another rank is gone."""
    while error is not None:
        if type(error).__name__ in _TORCH_ERRORS and _LOST_PEER.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an exception, or one of its causes, says that device or host memory is full."""
    while error is not None:
        # by name: torch is not imported here
        if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_host_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the memory of an out-of-memory error, or of one of its causes, is the host's."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if any(text in str(error) for text in _HOST_OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def read_peer_error(run_folder: Path) -> dict[str, Any] | None:
    """Read the out-of-memory report of a rank other than 0; None if there is no complete one."""
    for path in sorted((run_folder / OOM_FOLDER).glob("rank_*.json")):
        with contextlib.suppress(OSError, json.JSONDecodeError):
            report: dict[str, Any] = json.loads(path.read_text())
            if report["rank"] > 0:
                return report
    return None


def failure_from_exception(error: BaseException, *, exit_code: int, report: str) -> Failure:
    """Return an exception as a failure that happens now."""
    return Failure(
        exit_code=exit_code,
        message=f"{type(error).__name__}: {error}",
        report=report,
        time=time.time(),
        by_peer=is_peer_failure(error),
    )


def write_failure(failure: Failure, file: Path) -> None:
    """Write a failure atomically: a reader sees the complete file or none."""
    fields = {
        "message": {
            "message": failure.message,
            "extraInfo": {"py_callstack": failure.report, "timestamp": str(int(failure.time))},
        },
        "time": failure.time,
        "exit_code": failure.exit_code,
        "by_peer": failure.by_peer,
    }
    write_atomically(file, json.dumps(fields))


def read_failure(file: Path) -> Failure | None:
    """Read what `write_failure` wrote; None if there is no such file."""
    if not file.is_file():
        return None
    fields: dict[str, Any] = json.loads(file.read_text())
    return Failure(
        exit_code=fields["exit_code"],
        message=fields["message"]["message"],
        report=fields["message"]["extraInfo"]["py_callstack"],
        time=fields["time"],
        by_peer=fields["by_peer"],
    )
