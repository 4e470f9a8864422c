"""Start one new process per rank on this machine, monitor them, and report how they exited. Imports no torch."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from recipes.config.resolved import ResolvedRun, to_json
from recipes.errors import COMMAND_VARIABLE, NOTEBOOK, ConfigError, in_notebook
from recipes.files import describe, probe
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.failure import ERROR_FILE, STACK_SUFFIX, Failure, read_failure
from recipes.runtime.process import python_path
from recipes.runtime.signals import SecondSignalError, forward_signals_to, signals_blocked
from recipes.runtime.world import RANK_FILE, Ranks, num_cores

# -P: a folder named `recipes` in the working directory must not be imported instead of this project
_RANK_COMMAND = (sys.executable, "-P", "-m", "recipes.entry.rank_main")
# exit codes of ranks that have already reported what happened
_REPORTED_CODES = frozenset(ExitCode) - {ExitCode.FINISHED, ExitCode.CRASHED}
_FAILURE_GRACE_SECONDS = 5.0  # for the other ranks to exit once one has failed
_STOP_GRACE_SECONDS = 10.0  # for ranks to exit by themselves once one has exited with a reported code
_CAUSE_SECONDS = 2.0  # for the rank that failed first to be detected, after its peers
_POLL_SECONDS = 0.05
_LOG_TAIL_LINES = 20
_COMPOSED_FILE = "composed.json"


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """Exit status of a run with several ranks.

    Attributes:
        exit_code: Exit code of the run.
        report: Text that no rank has printed yet; None if nothing is left to print.
        crashed: Whether a rank failed without a reported exit code.
    """

    exit_code: int
    report: str | None = None
    crashed: bool = False


@dataclass(kw_only=True)
class _RankProcess:
    rank: int
    process: subprocess.Popen[bytes]
    error_file: Path
    log_file: Path | None  # None: rank 0 prints to the console
    alive_at: float = field(default_factory=time.time)  # when it was last seen running

    def is_running(self) -> bool:
        if self.process.poll() is None:
            self.alive_at = time.time()
            return True
        return False

    def has_failed(self) -> bool:
        """Return whether it exited with an error or has written one: a failed rank may hang while exiting."""
        return self.process.poll() not in (None, 0) or self.error_file.exists()

    def failure(self) -> Failure:
        """Return the failure that it wrote, else its exit status with the time it was last seen running."""
        if (written := read_failure(self.error_file)) is not None:
            return written
        code = self.process.returncode
        message = f"ended with exit code {code}"
        if code < 0:
            message = f"was killed by {signal.Signals(-code).name}"
        return Failure(exit_code=code, message=message, report=self._tail(), time=self.alive_at)

    def _tail(self) -> str:
        """Return the stack trace of a segmentation fault, else the last lines that the rank printed."""
        stack_file = self.error_file.with_suffix(STACK_SUFFIX)
        if stack_file.is_file() and (stack := stack_file.read_text(errors="replace", encoding="utf-8")):
            return stack.partition("\nExtension modules:")[0]
        if self.log_file is None:
            return ""
        lines = self.log_file.read_text(errors="replace", encoding="utf-8").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def forward(self, number: int) -> None:
        """Forward a signal number through the pipe that `die_with_parent` reads."""
        assert self.process.stdin is not None, "opened as a pipe"
        with contextlib.suppress(OSError):  # it has exited
            self.process.stdin.write(bytes([number]))
            self.process.stdin.flush()


def spawn_ranks(resolved: ResolvedRun, ranks: Ranks) -> ProcessExit:
    """Execute a run with one process per rank, all with this composed config; all have exited on return.

    The first SIGTERM, SIGUSR1 or Ctrl-C is forwarded to the ranks, which save and stop; a second one ends them at once.

    Raises:
        ConfigError: The temporary folder is full or cannot be written to.
    """
    processes: list[_RankProcess] = []
    received: list[int] = []

    def forward(number: int) -> None:
        received.append(number)
        for process in processes:
            process.forward(number)

    with temporary_folder("recipes_ranks_") as folder, forward_signals_to(forward):
        (folder / _COMPOSED_FILE).write_text(to_json(resolved), encoding="utf-8")
        port = _free_port()
        try:
            # signals stay blocked until every rank can be reached, and in each rank (mask inherited) until it listens
            with signals_blocked():
                for rank in range(ranks.world_size):
                    processes.append(_start(rank, ranks.world_size, port, folder))
            for number in received[:1]:  # it may have come before the first rank was started
                forward(number)
            return _watch(processes)
        except SecondSignalError as second:
            by = "Interrupted by a second Ctrl-C" if second.number == signal.SIGINT else "Terminated by a second signal"
            return ProcessExit(exit_code=128 + second.number, report=by)
        finally:
            _kill(processes)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a folder for messages between processes, which is removed afterwards.

    Raises:
        ConfigError: The temporary folder is full or cannot be written to.
    """
    try:
        name = tempfile.mkdtemp(prefix=prefix)
        probe(Path(name))
    except OSError as error:
        raise ConfigError(
            f"TMPDIR={os.environ.get('TMPDIR', '')}",
            f"the temporary folder cannot be written to: {describe(error)}",
            "TMPDIR=<a folder on a larger disk> before the command",
        ) from error
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)


def rank_environ(rank: int, world_size: int, port: int, composed: Path) -> dict[str, str]:
    """Return the environment variables that make a process one of this machine's ranks.

    Args:
        rank: Rank of the process.
        world_size: Number of ranks.
        port: Port on which rank 0 serves the rendezvous.
        composed: File with the composed run; each rank writes its error file next to it.
    """
    return {
        RANK_FILE: str(composed),
        ERROR_FILE: str(composed.with_name(f"rank_{rank}.json")),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _start(rank: int, world_size: int, port: int, folder: Path) -> _RankProcess:
    """Start a rank in a separate process group, so that Ctrl-C reaches it only once, through this process."""
    environ = os.environ | rank_environ(rank, world_size, port, folder / _COMPOSED_FILE)
    environ |= {"PYTHONPATH": python_path()} | ({COMMAND_VARIABLE: NOTEBOOK} if in_notebook() else {})
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")  # no other machine may connect
    environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // world_size)))
    log_file = folder / f"rank_{rank}.log" if rank else None
    with contextlib.ExitStack() as files:
        log: BinaryIO | None = files.enter_context(log_file.open("wb")) if log_file else None
        process = subprocess.Popen(
            _RANK_COMMAND,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            process_group=0,
            bufsize=0,  # unbuffered: nothing is left to flush when the rank is gone
        )
    return _RankProcess(rank=rank, process=process, error_file=Path(environ[ERROR_FILE]), log_file=log_file)


def _watch(processes: Sequence[_RankProcess]) -> ProcessExit:
    while True:
        # poll every process, to record when it was last seen running
        running = [process for process in processes if process.is_running()]
        failed = [process for process in processes if process.has_failed()]
        if failed:
            return _end_after_failure(processes, failed)
        if not running:
            return ProcessExit(exit_code=ExitCode.FINISHED)
        time.sleep(_POLL_SECONDS)


def _end_after_failure(processes: Sequence[_RankProcess], failed: Sequence[_RankProcess]) -> ProcessExit:
    """End the other ranks and report the first failure, not its consequences."""
    failed = _wait_for_cause(processes, failed)
    others = [process for process in processes if process not in failed]
    if all(process.process.returncode in _REPORTED_CODES for process in failed):
        # all ranks exit this way (preempted, diverged, …): let the others finish
        _wait(others, _STOP_GRACE_SECONDS)
    _signal(others, signal.SIGTERM)
    _wait(processes, _FAILURE_GRACE_SECONDS)
    _kill(processes)
    # exclude ranks that only died from the SIGTERM above, but not those that wrote an error before
    candidates = [process for process in processes if process in failed or process.error_file.exists()]
    failures = [(process, process.failure()) for process in candidates]
    first, failure = min(failures, key=lambda pair: (pair[1].caused_by_peer, pair[1].time))
    has_written = first.error_file.exists()
    if failure.exit_code in _REPORTED_CODES:
        return ProcessExit(exit_code=failure.exit_code, report=failure.report if has_written else None)
    name = f"rank {first.rank} of {len(processes)}"
    head = f"{name} failed" if has_written else f"{name} {failure.message}"
    report = f"{head}:\n{failure.report}" if failure.report else head
    return ProcessExit(exit_code=ExitCode.CRASHED, report=report, crashed=True)


def _wait_for_cause(processes: Sequence[_RankProcess], failed: Sequence[_RankProcess]) -> Sequence[_RankProcess]:
    """Return the failed ranks, after a short wait if so far all of them have only lost a peer.

    A rank that lost its connection is often detected before the rank that failed, which may still be writing its error.
    """
    deadline = time.monotonic() + _CAUSE_SECONDS
    while all(process.failure().caused_by_peer for process in failed) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        failed = [process for process in processes if process.has_failed()]
    return failed


def _signal(processes: Sequence[_RankProcess], number: signal.Signals) -> None:
    for process in processes:
        process.process.send_signal(number)  # no effect if it has exited


def _wait(processes: Sequence[_RankProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.is_running() for process in processes):
        time.sleep(_POLL_SECONDS)


def _kill(processes: Sequence[_RankProcess]) -> None:
    """Kill the process groups of ranks that still run, which include their loader workers."""
    for process in processes:
        if process.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.process.pid, signal.SIGKILL)
    for process in processes:
        process.process.wait()
        if process.process.stdin is not None:
            process.process.stdin.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
