"""Write and read each rank's error file, in the format of torchrun, for the process that started the rank."""

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.files import tolerating, write_atomically
from recipes.run_folder import OOM_FOLDER

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # environment variable of torchrun: path of this rank's error file
STACK_SUFFIX = ".stack"  # stack trace of a segmentation fault, next to the error file
# errors raised by Gloo, NCCL and the c10d store when a peer has died
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process exited|unhandled system error"
    r"|failed to recv, got 0 bytes|communicator was aborted|socket closed",
    re.IGNORECASE,
)
# errors of allocators, CUDA libraries, NCCL, Triton and the operating system; duplicated in callbacks/memory
_OUT_OF_MEMORY = re.compile(r"out of memory|_ALLOC_FAILED|can(no|')t allocate memory", re.IGNORECASE)
_HOST_OUT_OF_MEMORY = ("DefaultCPUAllocator", "Cannot allocate memory")
_ERRORS_OF_LOST_PEERS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failure of a rank.

    Attributes:
        exit_code: Exit code of the rank.
        message: One-line summary.
        report: What to print: a traceback, or the errors in the config.
        time: Unix time of the failure, in seconds.
        caused_by_peer: Whether this rank failed only because another one had failed and the connection was lost.
    """

    exit_code: int
    message: str
    report: str
    time: float
    caused_by_peer: bool = False


def get_error_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file to write this process's failure to; None if no launcher reads it."""
    path = environ.get(ERROR_FILE)
    return Path(path) if path else None


def is_peer_failure(error: BaseException | None) -> bool:
    """Return whether an exception, or one of its causes, indicates that another rank has died."""
    return any(type(e).__name__ in _ERRORS_OF_LOST_PEERS and _LOST_PEER.search(str(e)) for e in _with_causes(error))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an exception, or one of its causes, is an out-of-memory error of the device or the host."""
    return any(
        type(e).__name__ in ("OutOfMemoryError", "MemoryError")  # by name: torch is not imported here
        or (isinstance(e, OSError) and e.errno == errno.ENOMEM)
        or (isinstance(e, RuntimeError) and _OUT_OF_MEMORY.search(str(e)))
        for e in _with_causes(error)
    )


def is_host_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an out-of-memory error, or one of its causes, came from host memory."""
    return any(
        isinstance(e, MemoryError)
        or getattr(e, "errno", None) == errno.ENOMEM
        or any(text in str(e) for text in _HOST_OUT_OF_MEMORY)
        for e in _with_causes(error)
    )


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its chain of causes and contexts."""
    seen = set[int]()  # a cause may lead back to its effect: `raise error from error`
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def read_oom_of_other_rank(run_folder: Path) -> dict[str, Any] | None:
    """Return the first complete out-of-memory report of a rank other than 0; None if there is none."""
    for path in sorted((run_folder / OOM_FOLDER).glob("rank_*.json")):
        with contextlib.suppress(OSError, json.JSONDecodeError):
            report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if report["rank"] > 0:
                return report
    return None


def failure_from_exception(error: BaseException, *, exit_code: int, report: str) -> Failure:
    """Build a failure from an exception, with the current time."""
    return Failure(
        exit_code=exit_code,
        message=f"{type(error).__name__}: {error}",
        report=report,
        time=time.time(),
        caused_by_peer=is_peer_failure(error),
    )


def write_failure(failure: Failure, path: Path) -> None:
    """Write a failure atomically: readers see the complete file or none."""
    fields = {
        "message": {
            "message": failure.message,
            "extraInfo": {"py_callstack": failure.report, "timestamp": str(int(failure.time))},
        },
        "time": failure.time,
        "exit_code": failure.exit_code,
        "caused_by_peer": failure.caused_by_peer,
    }
    with tolerating(path):  # the exit code says the rest
        write_atomically(path, json.dumps(fields))


def read_failure(path: Path) -> Failure | None:
    """Read a failure written by `write_failure`; None if there is no such file."""
    if not path.is_file():
        return None
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Failure(
        exit_code=fields["exit_code"],
        message=fields["message"]["message"],
        report=fields["message"]["extraInfo"]["py_callstack"],
        time=fields["time"],
        caused_by_peer=fields["caused_by_peer"],
    )
