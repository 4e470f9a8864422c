"""A life: the processes of one start of a run, from the start to their end. Forked by the zygote, or a real command."""

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

from recipes.config.compose import Composed, to_json
from recipes.entry.spawn import _free_port, rank_environ

_ALONE_SECONDS = 0.5  # that ranks are given to end by themselves once one is killed
_GONE_SECONDS = 30.0  # for what a killed command has started


class Life(Protocol):
    """One start of a run."""

    def has_ended(self) -> bool: ...

    def kill(self, draw: random.Random) -> bool:
        """SIGKILL at once, and all that is left a little later; False where the run had ended before."""

    def end(self) -> int:
        """Wait; the exit code of the run: 0, or that of a rank that failed."""


def environment() -> dict[str, str]:
    """Of every run: one thread a process; this project and the callbacks of tests are found."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


class Zygote:
    """The client of `zygote.py`. Importing what a run imports takes it some seconds, once.

    Args:
        runs: Composed runs, of which it imports what they name.
    """

    def __init__(self, runs: Sequence[Composed]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("zygote.py"))],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        targets = {target for run in runs for target in _targets(run.config)}
        modules = sorted({target.rpartition(".")[0] for target in targets})
        (num_threads,) = self.ask("warm", modules=modules)
        assert num_threads == 1, f"{num_threads} threads where ranks are forked"

    def ask(self, what: str, **arguments: Any) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what} | arguments) + "\n")
        self._process.stdin.flush()
        answer: list[int] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """Kills what still runs."""
        self._process.communicate(timeout=60)


class ForkedLife:
    """Ranks forked by the zygote, in the environment that `start_ranks` gives them."""

    def __init__(self, zygote: Zygote, run: Composed, log: Path, *, world_size: int) -> None:
        self._zygote = zygote
        self._folder = tempfile.TemporaryDirectory(prefix="kill_ranks_")
        run_file = Path(self._folder.name) / "composed.json"
        run_file.write_text(to_json(run))
        environs: list[dict[str, str]] = [{}]
        if world_size > 1:
            environs = list(_environs(run_file, world_size))
        logs = [str(log.with_suffix(f".{rank}.log")) for rank in range(world_size)]
        self._pids = zygote.ask("start", run_file=str(run_file), environs=environs, logs=logs)
        self._handles = [os.pidfd_open(pid) for pid in self._pids]
        self._codes: list[int] | None = None

    def has_ended(self) -> bool:
        return all(self._is_gone(number) for number in range(len(self._pids)))

    def kill(self, draw: random.Random) -> bool:
        numbers = list(range(len(self._pids)))
        draw.shuffle(numbers)
        first, *others = numbers
        self._signal(first)
        if others:
            alone = draw.random() < 0.5
            time.sleep(draw.uniform(0.01, 0.05))
            until = time.monotonic() + _ALONE_SECONDS * alone
            while time.monotonic() < until and not all(map(self._is_gone, others)):
                time.sleep(0.005)
        for number in others:
            self._signal(number)
        self._wait()
        assert self._codes is not None
        return self._codes[first] == -signal.SIGKILL

    def end(self) -> int:
        codes = self._wait()
        return next((code for code in codes if code), 0)

    def _is_gone(self, number: int) -> bool:
        return bool(select.select([self._handles[number]], [], [], 0)[0])

    def _signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._handles[number], signal.SIGKILL)

    def _wait(self) -> list[int]:
        if self._codes is None:
            self._codes = self._zygote.ask("wait", pids=self._pids)
            for handle in self._handles:
                os.close(handle)
            self._folder.cleanup()
        return self._codes


class CommandLife:
    """`python train.py …` as a person types it, with its own ranks; SIGKILL hits it, or one of its ranks."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self._mark = f"{log.resolve()}"
        with log.with_suffix(".log").open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *words],
                env=environment() | marked(self._mark),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self, draw: random.Random) -> bool:
        """What dies of it is waited for; nothing may be left."""
        pid = self._process.pid
        ranks = _children(pid)
        victim = draw.choice(ranks) if ranks and draw.random() < 0.5 else pid
        os.kill(victim, signal.SIGKILL)
        code = self._process.wait(_GONE_SECONDS)
        until = time.monotonic() + _GONE_SECONDS
        while (left := living(self._mark)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not left, f"{left} outlive the run that was killed"
        return code != 0

    def end(self) -> int:
        return self._process.wait()


def _environs(run_file: Path, world_size: int) -> Iterator[dict[str, str]]:
    port = _free_port()
    for rank in range(world_size):
        yield rank_environ(rank, world_size, port, run_file)


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def _targets(node: Any) -> Iterator[str]:
    """Every `_target_` of a config."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from _targets(value)
