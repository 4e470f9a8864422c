"""The jobs of a sweep as processes of this machine, each with devices or cores of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from recipes.config.ranks import get_ranks
from recipes.config.traits import get_traits
from recipes.errors import ConfigError
from recipes.launcher import Handle
from recipes.launcher.environ import clean_environ
from recipes.launcher.job import Job
from recipes.launcher.job_main import CORES, WITH_PARENT
from recipes.runtime.process import python_path
from recipes.runtime.signals import signals_blocked
from recipes.runtime.world import num_gpus

LOG_FILE = "job.log"  # all that the job's processes say
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Local:
    """Runs jobs side by side: on GPUs as many as there are devices, on a CPU `max_jobs`, each with its share of cores.

    Args:
        devices_per_job: Devices that each job sees, for those that take all they see; None: as each job asks.
        max_jobs: Jobs at a time; None: on GPUs as many as fit, on a CPU one with all cores.
    """

    def __init__(
        self,
        *,
        devices_per_job: Annotated[int, ">= 1"] | None,
        max_jobs: Annotated[int, ">= 1"] | None,
    ) -> None:
        self.max_jobs = max_jobs
        self.waits = self.is_bounded = True
        self._devices_per_job = devices_per_job
        self._running: list[_Process] = []
        self._gpus = _visible_gpus(os.environ)
        self._cores = sorted(os.sched_getaffinity(0))

    def words_of(self, job: Job) -> list[str]:
        """A job that takes every device takes `devices_per_job` of them."""
        assert job.composed is not None
        config = job.composed.config
        takes_all = config["trainer"]["devices"] in ("auto", -1)
        single = not get_traits(config["strategy"]).needs_process_group
        if self._devices_per_job is None or not takes_all or single:
            return []
        return [f"trainer.devices={self._devices_per_job}"]

    def num_devices(self, job: Job) -> int:
        assert job.composed is not None
        num_devices = get_ranks(job.composed.config, {}).world_size
        if self._devices_per_job is not None and num_devices > self._devices_per_job:
            raise ConfigError(
                f"trainer.devices={num_devices} launcher.devices_per_job={self._devices_per_job}",
                "the job asks for more devices than it gets",
                f"launcher.devices_per_job={num_devices}, or trainer.devices=auto",
            )
        return num_devices

    def is_full(self) -> bool:
        self._running = [one for one in self._running if one.poll() is None]
        if self._gpus and not self._free_gpus():
            return True
        return len(self._running) >= self._most()

    def start(self, waiting: Sequence[Job]) -> list[Handle]:
        started: list[Handle] = []
        for job in waiting:
            if self.is_full():
                break
            if (room := self._room_for(job)) is not None:
                process = _Process(job, room)
                self._running.append(process)
                started.append(process)
        return started

    def log_of(self, job: Job) -> Path:
        return job.folder / LOG_FILE

    def describe(self) -> str:
        most = f"at most {self._most()} at a time" if self._most() > 1 else "one at a time"
        if self._gpus:
            return f"on {len(self._gpus)} GPUs" + (f", {most}" if self.max_jobs else "")
        return f"on {len(self._cores)} cores, {most}"

    def _most(self) -> int:
        if self.max_jobs is not None:
            return self.max_jobs
        return len(self._gpus) if self._gpus else 1

    def _room_for(self, job: Job) -> "_Room | None":
        """None: there are not so many devices now."""
        assert job.composed is not None
        if not self._gpus or job.composed.config["trainer"]["accelerator"] == "cpu":
            slots = {one.room.slot for one in self._running}
            slot = next(number for number in range(self._most()) if number not in slots)
            cores = _share(self._cores, slot, self._most())
            return _Room(slot=slot, environ={CORES: ",".join(map(str, cores))})
        free, named = self._free_gpus(), job.composed.config["trainer"]["devices"]
        if isinstance(named, list):  # by their numbers, which must stay what they are
            wanted = [self._gpus[index] for index in named]
            return _Room(gpus=wanted) if set(wanted) <= set(free) else None
        num_devices = self.num_devices(job)
        if num_devices > len(free):
            return None
        taken = free[:num_devices]
        return _Room(gpus=taken, environ={VISIBLE: ",".join(taken)})

    def _free_gpus(self) -> list[str]:
        taken = {gpu for one in self._running for gpu in one.room.gpus}
        return [gpu for gpu in self._gpus if gpu not in taken]


@dataclass(frozen=True, kw_only=True)
class _Room:
    """What a job has to itself.

    Attributes:
        slot: Of those on a CPU; None: it has GPUs.
        gpus: By the words that CUDA takes.
        environ: What tells its process.
    """

    slot: int | None = None
    gpus: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)


class _Process:
    """A job's process; its ranks end with it."""

    def __init__(self, job: Job, room: _Room) -> None:
        self.job = job
        self.room = room
        with (job.folder / LOG_FILE).open("ab") as log, signals_blocked():  # until it listens
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "recipes.launcher.job_main",
                    WITH_PARENT,
                    str(job.file),
                ],
                env=clean_environ() | room.environ | {"PYTHONPATH": python_path()},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,
                bufsize=0,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def is_waiting(self) -> bool:
        return False

    def ask(self, number: int) -> None:
        assert self._process.stdin is not None, "opened as a pipe"
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(bytes([number]))

    def kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.close()


def _visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs of this machine by the words that CUDA takes."""
    count = num_gpus()
    if VISIBLE not in environ:
        return [str(number) for number in range(count)]
    words = [word.strip() for word in environ[VISIBLE].split(",")]
    named = words[: words.index("-1")] if "-1" in words else words  # where CUDA stops reading
    return named[:count]


def _share(cores: Sequence[int], slot: int, num_slots: int) -> list[int]:
    """The cores of one of several jobs; each has one at least."""
    each = max(1, len(cores) // num_slots)
    first = slot * each % len(cores)
    return list(cores[first : first + each])
