"""Starts one fresh process a rank on this machine, watches over them and says how they ended. Imports no torch."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from recipes.config.compose import Composed, to_json
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.failure import ERROR_FILE, STACK, Failure, read_failure
from recipes.runtime.process import python_path
from recipes.runtime.signals import SecondSignalError, forward_signals_to, signals_blocked
from recipes.runtime.world import RANK_FILE, Ranks

# exit codes that say what happened, and that the rank has said it
_OURS = (
    2,
    3,
    ExitCode.OUT_OF_MEMORY,
    ExitCode.UNSAVED,
    ExitCode.PREEMPTED,
    ExitCode.TERMINATED,
    ExitCode.INTERRUPTED,
)
_FAILED_SECONDS = 5.0  # for the others to end once one rank has failed
_ASKED_SECONDS = 10.0  # to end by themselves when a person or the cluster asks
_CAUSE_SECONDS = 2.0
_POLL_SECONDS = 0.05
_TAIL_LINES = 20
_COMPOSED_FILE = "composed.json"


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """How a run of several ranks ended.

    Attributes:
        exit_code: Of the run.
        report: What a rank has not said itself; None: everything is said.
        crashed: Whether a rank failed by something other than the config.
    """

    exit_code: int
    report: str | None = None
    crashed: bool = False


@dataclass(kw_only=True)
class _Process:
    rank: int
    process: subprocess.Popen[bytes]
    error_file: Path
    log_file: Path | None  # rank 0 speaks to the console
    alive_at: float = field(default_factory=time.time)

    def is_running(self) -> bool:
        if self.process.poll() is None:
            self.alive_at = time.time()
            return True
        return False

    def has_failed(self) -> bool:
        """By its exit code, or by its error before it comes to exit: a dead engine may hold it."""
        return self.process.poll() not in (None, 0) or self.error_file.exists()

    def failure(self) -> Failure:
        """What it wrote; else how it ended, at the time it was last alive."""
        if (written := read_failure(self.error_file)) is not None:
            return written
        code = self.process.returncode
        message = f"ended with exit code {code}"
        if code < 0:
            message = f"was killed by {signal.Signals(-code).name}"
        return Failure(exit_code=code, message=message, report=self._tail(), time=self.alive_at)

    def _tail(self) -> str:
        """The stack of a segmentation fault; else the last that the rank said."""
        stack = self.error_file.with_suffix(STACK)
        if stack.is_file() and (text := stack.read_text(errors="replace")):
            return text.partition("\nExtension modules:")[0]
        if self.log_file is None:
            return ""
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def spawn_ranks(composed: Composed, ranks: Ranks) -> ProcessExit:
    """Carry out a run by one process a rank, all from this one composition; none is left when it returns."""
    started: list[_Process] = []

    asked: list[int] = []

    def tell(number: int) -> None:
        asked.append(number)
        for one in started:
            _ask_to_stop(one, number)

    with tempfile.TemporaryDirectory(prefix="recipes_ranks_") as name, forward_signals_to(tell):
        folder = Path(name)
        (folder / _COMPOSED_FILE).write_text(to_json(composed))
        port = _free_port()
        try:
            with (
                signals_blocked()
            ):  # for us: until all ranks can be told; for them: until they listen
                for rank in range(ranks.world_size):
                    started.append(_start(rank, ranks.world_size, port, folder))
            for number in asked[:1]:  # before there was anybody to tell
                tell(number)
            return _watch(started)
        except KeyboardInterrupt:
            return _interrupted(started)
        except SecondSignalError as second:
            return ProcessExit(
                exit_code=128 + second.number, report="Terminated by a second signal"
            )
        finally:
            _kill(started)


def rank_environ(rank: int, world_size: int, port: int, composed: Path) -> dict[str, str]:
    """What makes a process one of the ranks of this machine.

    Args:
        rank: Which.
        world_size: Of how many.
        port: Where rank 0 meets the others.
        composed: The file that holds the composed run; each rank leaves its error beside it.
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


def _start(rank: int, world_size: int, port: int, folder: Path) -> _Process:
    """One rank in a process group of its own: a Ctrl-C in the terminal reaches it through us, once."""
    environ = os.environ | rank_environ(rank, world_size, port, folder / _COMPOSED_FILE)
    environ |= {"PYTHONPATH": python_path()}
    error_file = Path(environ[ERROR_FILE])
    environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // world_size)))
    log_file = folder / f"rank_{rank}.log" if rank else None
    with contextlib.ExitStack() as files:
        log: BinaryIO | None = files.enter_context(log_file.open("wb")) if log_file else None
        process = subprocess.Popen(
            # -P: a folder of the same name where the run is started is not taken for this project
            [sys.executable, "-P", "-m", "recipes.entry.rank_main"],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            process_group=0,
            bufsize=0,  # nothing is left to write when the rank is gone
        )
    return _Process(rank=rank, process=process, error_file=error_file, log_file=log_file)


def _watch(started: Sequence[_Process]) -> ProcessExit:
    while True:
        running = [one for one in started if one.is_running()]
        failed = [one for one in started if one.has_failed()]
        if failed:
            return _end_of_failed(started, failed)
        if not running:
            return ProcessExit(exit_code=0)
        time.sleep(_POLL_SECONDS)


def _end_of_failed(started: Sequence[_Process], failed: Sequence[_Process]) -> ProcessExit:
    """Stop the others, and find what came first; what was torn down by that is no cause."""
    failed = _with_cause(started, failed)
    others = [one for one in started if one not in failed]
    if all(one.process.returncode in _OURS for one in failed):
        _wait(others, _ASKED_SECONDS)  # all ranks say the same: they end by themselves
    _signal(others, signal.SIGTERM)
    _wait(started, _FAILED_SECONDS)
    _kill(started)
    told = [one for one in started if one in failed or one.error_file.exists()]
    failures = [(one.rank, one.failure()) for one in told]
    rank, first = min(failures, key=lambda pair: (pair[1].by_peer, pair[1].time))
    written = any(one.rank == rank and one.error_file.exists() for one in told)
    if first.exit_code in _OURS:
        return ProcessExit(exit_code=first.exit_code, report=first.report if written else None)
    who = f"rank {rank} of {len(started)}"
    head = f"{who} failed" if written else f"{who} {first.message}"
    report = f"{head}:\n{first.report}" if first.report else head
    return ProcessExit(exit_code=ExitCode.CRASHED, report=report, crashed=True)


def _with_cause(started: Sequence[_Process], failed: Sequence[_Process]) -> Sequence[_Process]:
    """Ranks that lost a peer are often seen before the peer itself: wait for it a moment."""
    until = time.monotonic() + _CAUSE_SECONDS
    while all(one.failure().by_peer for one in failed) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        failed = [one for one in started if one.has_failed()]
    return failed


def _interrupted(started: Sequence[_Process]) -> ProcessExit:
    """Hand Ctrl-C to the ranks and give them time; a second one kills them."""
    with contextlib.suppress(KeyboardInterrupt, SecondSignalError):
        _signal(started, signal.SIGINT)
        _wait(started, _ASKED_SECONDS)
    said = any(one.rank == 0 and one.process.poll() == ExitCode.INTERRUPTED for one in started)
    return ProcessExit(exit_code=ExitCode.INTERRUPTED, report=None if said else "Interrupted")


def _signal(processes: Sequence[_Process], number: signal.Signals) -> None:
    for one in processes:
        one.process.send_signal(number)  # does nothing where it has ended


def _wait(processes: Sequence[_Process], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(one.is_running() for one in processes):
        time.sleep(_POLL_SECONDS)


def _kill(processes: Sequence[_Process]) -> None:
    """With what they started: workers that load data are in their groups."""
    for one in processes:
        if one.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
    for one in processes:
        one.process.wait()
        if one.process.stdin is not None:
            one.process.stdin.close()


def _ask_to_stop(one: _Process, number: int) -> None:
    assert one.process.stdin is not None, "opened as a pipe"
    with contextlib.suppress(OSError):  # it has ended
        one.process.stdin.write(bytes([number]))
        one.process.stdin.flush()


def _num_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
