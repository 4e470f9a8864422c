"""A life: the processes of one start of a run, forked by the zygote or started by the real command."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from started import living, marked
from support import ROOT

from recipes.config.resolved import ResolvedRun, to_json
from recipes.entry.spawn import _free_port, rank_environ

_ORPHAN_SECONDS = 0.5  # for the other ranks to exit by themselves once one is killed
_EXIT_SECONDS = 30.0  # for the processes that a killed command has started


class Life(Protocol):
    """One start of a run."""

    def has_ended(self) -> bool: ...

    def kill(self, rng: random.Random) -> bool:
        """Send SIGKILL, and shortly after to all that is left; return False where the run had already ended."""

    def wait(self) -> int:
        """Wait and return the exit code of the run: 0, or that of a failed rank."""


def environment() -> dict[str, str]:
    """Return the environment of every run: one thread per process; the project and tests on the path."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


class Zygote:
    """The client of `zygote.py`, which spends seconds once on the imports of a run.

    Args:
        runs: Composed runs, whose `_target_` modules it imports.
    """

    def __init__(self, runs: Sequence[ResolvedRun]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("zygote.py"))],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        targets = {target for run in runs for target in _targets(run.config)}
        modules = sorted({target.rpartition(".")[0] for target in targets})
        (num_threads,) = self.request("warm", modules=modules)
        assert num_threads == 1, f"{num_threads} threads where ranks are forked"

    def request(self, method: str, **arguments: Any) -> list[int]:
        """Call a method of `zygote.Ranks` and return its result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": method} | arguments) + "\n")
        self._process.stdin.flush()
        response: list[int] = json.loads(self._process.stdout.readline())
        return response

    def close(self) -> None:
        """Close its input, upon which it kills what still runs."""
        self._process.communicate(timeout=60)


class ForkedLife:
    """Ranks forked by the zygote, in the environment that `entry.spawn` gives them."""

    def __init__(self, zygote: Zygote, run: ResolvedRun, log: Path, *, world_size: int) -> None:
        self._zygote = zygote
        self._folder = tempfile.TemporaryDirectory(prefix="kill_ranks_")
        run_file = Path(self._folder.name) / "composed.json"
        run_file.write_text(to_json(run))
        environs: list[dict[str, str]] = [{}]
        if world_size > 1:
            environs = list(_environs(run_file, world_size))
        logs = [str(log.with_suffix(f".{rank}.log")) for rank in range(world_size)]
        self._pids = zygote.request("start", run_file=str(run_file), environs=environs, logs=logs)
        self._handles = [os.pidfd_open(pid) for pid in self._pids]
        self._codes: list[int] | None = None

    def has_ended(self) -> bool:
        return all(self._has_exited(rank) for rank in range(len(self._pids)))

    def kill(self, rng: random.Random) -> bool:
        ranks = list(range(len(self._pids)))
        rng.shuffle(ranks)
        first, *others = ranks
        self._kill_rank(first)
        if others:
            waits = rng.random() < 0.5  # in half of the kills the others get time to notice by themselves
            time.sleep(rng.uniform(0.01, 0.05))
            until = time.monotonic() + _ORPHAN_SECONDS * waits
            while time.monotonic() < until and not all(map(self._has_exited, others)):
                time.sleep(0.005)
        for rank in others:
            self._kill_rank(rank)
        self._wait()
        assert self._codes is not None
        return self._codes[first] == -signal.SIGKILL

    def wait(self) -> int:
        codes = self._wait()
        return next((code for code in codes if code), 0)

    def _has_exited(self, rank: int) -> bool:
        return bool(select.select([self._handles[rank]], [], [], 0)[0])

    def _kill_rank(self, rank: int) -> None:
        signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)

    def _wait(self) -> list[int]:
        if self._codes is None:
            self._codes = self._zygote.request("wait", pids=self._pids)
            for handle in self._handles:
                os.close(handle)
            self._folder.cleanup()
        return self._codes


class CommandLife:
    """The real `python train.py …` with its own ranks; SIGKILL hits the command or one of its ranks."""

    def __init__(self, overrides: Sequence[str], log: Path) -> None:
        self._mark = f"{log.resolve()}"
        with log.with_suffix(".log").open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *overrides],
                env=environment() | marked(self._mark),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self, rng: random.Random) -> bool:
        """Kill the command or a rank and wait: no process may be left."""
        pid = self._process.pid
        ranks = _children(pid)
        victim = rng.choice(ranks) if ranks and rng.random() < 0.5 else pid
        os.kill(victim, signal.SIGKILL)
        code = self._process.wait(_EXIT_SECONDS)
        until = time.monotonic() + _EXIT_SECONDS
        while (left := living(self._mark)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not left, f"{left} outlive the run that was killed"
        return code != 0

    def wait(self) -> int:
        return self._process.wait()


def _environs(run_file: Path, world_size: int) -> Iterator[dict[str, str]]:
    port = _free_port()
    for rank in range(world_size):
        yield rank_environ(rank, world_size, port, run_file)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _targets(node: Any) -> Iterator[str]:
    """Yield every `_target_` of a config."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from _targets(value)
