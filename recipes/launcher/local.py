"""Run the jobs of a sweep as processes on this machine, each with its own devices or cores."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from recipes.errors import ConfigError
from recipes.launcher import Handle
from recipes.launcher.environ import clean_environ
from recipes.launcher.job import Job
from recipes.launcher.job_main import CORES, WITH_PARENT
from recipes.runtime.process import python_path
from recipes.runtime.signals import signals_blocked
from recipes.runtime.world import num_gpus

LOG_FILE = "job.log"  # console output of the job's processes
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Local:
    """Runs jobs in parallel: as many as fit on GPUs; on a CPU `max_jobs`, each with an equal share of the cores.

    Args:
        devices_per_job: Devices per job with `trainer.devices=auto`; None: all devices.
        max_jobs: Maximum number of parallel jobs; None: as many as fit on GPUs, or one with all cores on a CPU.
    """

    def __init__(
        self,
        *,
        devices_per_job: Annotated[int, ">= 1"] | None,
        max_jobs: Annotated[int, ">= 1"] | None,
    ) -> None:
        self.max_jobs = max_jobs
        self.waits = self.limits_concurrency = True
        self._devices_per_job = devices_per_job
        self._running: list[_Process] = []
        self._gpus = _visible_gpus(os.environ)  # as CUDA names them
        self._cores = sorted(os.sched_getaffinity(0))

    def extra_overrides(self, job: Job) -> list[str]:
        """Return `trainer.devices` for a job that would use all devices, if `devices_per_job` is set."""
        assert job.composed is not None
        uses_all = job.composed.devices in ("auto", -1)
        is_single = not job.composed.strategy.needs_process_group
        if self._devices_per_job is None or not uses_all or is_single:
            return []
        return [f"trainer.devices={self._devices_per_job}"]

    def num_devices(self, job: Job) -> int:
        assert job.composed is not None
        num_devices = job.composed.requested_ranks.world_size
        if self._devices_per_job is not None and num_devices > self._devices_per_job:
            raise ConfigError(
                f"trainer.devices={num_devices} launcher.devices_per_job={self._devices_per_job}",
                "the job needs more devices than each job gets",
                f"launcher.devices_per_job={num_devices}, or trainer.devices=auto",
            )
        return num_devices

    def is_full(self) -> bool:
        self._running = [process for process in self._running if process.poll() is None]
        if self._gpus and not self._free_gpus():
            return True
        return len(self._running) >= self._max_parallel()

    def start(self, waiting: Sequence[Job]) -> list[Handle]:
        started: list[Handle] = []
        for job in waiting:
            if self.is_full():
                break
            if (resources := self._find_resources(job)) is not None:
                process = _Process(job, resources)
                self._running.append(process)
                started.append(process)
        return started

    def log_path(self, job: Job) -> Path:
        return job.folder / LOG_FILE

    def describe(self) -> str:
        parallel = f"at most {self._max_parallel()} at a time" if self._max_parallel() > 1 else "one at a time"
        if self._gpus:
            return f"on {len(self._gpus)} GPUs" + (f", {parallel}" if self.max_jobs else "")
        return f"on {len(self._cores)} cores, {parallel}"

    def _max_parallel(self) -> int:
        if self.max_jobs is not None:
            return self.max_jobs
        return len(self._gpus) if self._gpus else 1

    def _find_resources(self, job: Job) -> "_Resources | None":
        """Return free devices or cores for a job; None if too few devices are free now."""
        assert job.composed is not None
        if not self._gpus or job.composed.accelerator == "cpu":
            slots = {process.resources.slot for process in self._running}
            slot = next(number for number in range(self._max_parallel()) if number not in slots)
            cores = _cores_of_slot(self._cores, slot, self._max_parallel())
            return _Resources(slot=slot, environ={CORES: ",".join(map(str, cores))})
        free, devices = self._free_gpus(), job.composed.devices
        if isinstance(devices, list):
            # the job selects GPUs by index: all of them must stay visible to it
            wanted = [self._gpus[index] for index in devices]
            return _Resources(gpus=wanted) if set(wanted) <= set(free) else None
        num_devices = self.num_devices(job)
        if num_devices > len(free):
            return None
        gpus = free[:num_devices]
        return _Resources(gpus=gpus, environ={_VISIBLE: ",".join(gpus)})

    def _free_gpus(self) -> list[str]:
        used = {gpu for process in self._running for gpu in process.resources.gpus}
        return [gpu for gpu in self._gpus if gpu not in used]


@dataclass(frozen=True, kw_only=True)
class _Resources:
    """Devices or cores of one job.

    Attributes:
        slot: Index of its CPU slot; None if it has GPUs.
        gpus: Its GPUs, as CUDA_VISIBLE_DEVICES names them.
        environ: Variables that restrict its process to them.
    """

    slot: int | None = None
    gpus: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)


class _Process:
    """The process of a job; its ranks die with it."""

    def __init__(self, job: Job, resources: _Resources) -> None:
        self.job = job
        self.resources = resources
        # the signals stay blocked in the child until it listens, so that none is lost during startup
        with (job.folder / LOG_FILE).open("ab") as log, signals_blocked():
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "recipes.launcher.job_main",
                    WITH_PARENT,
                    str(job.file),
                ],
                env=clean_environ() | resources.environ | {"PYTHONPATH": python_path()},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C in the terminal reaches it only once, through `send_signal`
                bufsize=0,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def is_waiting(self) -> bool:
        return False

    def send_signal(self, number: int) -> None:
        """Send a signal through the pipe that `die_with_parent` reads."""
        assert self._process.stdin is not None, "opened as a pipe"
        with contextlib.suppress(OSError):  # it has exited
            self._process.stdin.write(bytes([number]))

    def kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.close()


def _visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: index, UUID or MIG instance."""
    count = num_gpus()
    if _VISIBLE not in environ:
        return [str(number) for number in range(count)]
    names = [name.strip() for name in environ[_VISIBLE].split(",")]
    visible = names[: names.index("-1")] if "-1" in names else names  # CUDA ignores everything after it
    return visible[:count]


def _cores_of_slot(cores: Sequence[int], slot: int, num_slots: int) -> list[int]:
    """Return the cores of one of several parallel jobs; at least one."""
    each = max(1, len(cores) // num_slots)
    first = slot * each % len(cores)
    return list(cores[first : first + each])
