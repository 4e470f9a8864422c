"""Runs and sweeps as jobs of SLURM, an array where there are several; preempted ones go on under their ids."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from recipes.config.traits import get_traits
from recipes.errors import ConfigError
from recipes.launcher import Handle
from recipes.launcher.job import Job
from recipes.launcher.slurm_queue import Queue
from recipes.launcher.slurm_script import TASK, after_ranks, before_ranks, job_environ

FOLDER = "slurm"  # beside the jobs: scripts, logs, exit codes
_JOB_NAME = "lightning_recipes"


class Slurm:
    """Submits jobs through submitit and follows them in the queue.

    Args:
        partition: Where; None: the cluster's default.
        time: The limit, in minutes or as sbatch takes it; None: the partition's.
        cpus_per_task: Cores of each rank; None: the cluster's default.
        gpus_per_node: None: one a rank, and none with `trainer.accelerator=cpu`.
        max_jobs: Of a sweep at a time; None: as many as the cluster takes.
        signal_seconds: Before the limit, for a run to save and be queued again.
        setup: Lines of shell before the ranks are started: modules, environments.
        directives: Any others of sbatch's, by their long names: `{account: a, constraint: h100}`.
        wait: Whether to follow a sweep's jobs to their end; False: submit and return.
    """

    def __init__(
        self,
        *,
        partition: str | None,
        time: int | str | None,
        cpus_per_task: int | None,
        gpus_per_node: int | None,
        max_jobs: Annotated[int, ">= 1"] | None,
        signal_seconds: int,
        setup: list[str],
        directives: dict[str, Any],
        wait: bool,
    ) -> None:
        self.max_jobs = max_jobs
        self.waits = wait
        self.is_bounded = wait and max_jobs is not None
        self._gpus_per_node = gpus_per_node
        self._options: dict[str, Any] = {
            "signal": f"USR1@{signal_seconds}",
            "requeue": True,
            "partition": partition,
            "time": time,
            "cpus-per-task": cpus_per_task,
        } | directives
        self._setup = setup
        self._started: list[_Submitted] = []
        self._queues: dict[Path, Queue] = {}

    def words_of(self, job: Job) -> list[str]:
        return []

    def num_devices(self, job: Job) -> int:
        nodes, per_node = _ranks_of(job)
        return nodes * per_node

    def is_full(self) -> bool:
        if self.max_jobs is None:
            return False
        return sum(one.poll() is None for one in self._started) >= self.max_jobs

    def start(self, waiting: Sequence[Job]) -> list[Handle]:
        """Submit them, those that ask for the same as one array; what is in the queue already is followed instead."""
        if not waiting:
            return []
        folder = waiting[0].folder.parent / FOLDER
        queue = self._queues.setdefault(folder, Queue(folder))
        # one of which the end has been taken in is over, whatever it has left
        open_jobs = {job.number: job.cluster_job for job in waiting if job.exit_code is None}
        here = queue.those_of([name for name in open_jobs.values() if name is not None])
        fresh = [
            job
            for job in waiting
            if job.number not in open_jobs or open_jobs[job.number] not in here
        ]
        for shape in dict.fromkeys(_shape_of(job) for job in fresh):
            alike = [job for job in fresh if _shape_of(job) == shape]
            for job, name in zip(alike, self._submit(alike, shape, folder), strict=True):
                job.cluster_job = name
                job.save()
        started = [_Submitted(job, queue) for job in waiting]
        self._started += started
        return list(started)

    def log_of(self, job: Job) -> Path:
        """What rank 0 of a job has said."""
        return job.folder.parent / FOLDER / f"{job.cluster_job}_0_log.out"

    def describe(self) -> str:
        partition = self._options["partition"]
        where = f" in partition {partition}" if partition else ""
        return f"by SLURM{where}" + (f", {self.max_jobs} at a time" if self.max_jobs else "")

    def _submit(self, jobs: Sequence[Job], shape: "_Shape", folder: Path) -> list[str]:
        """The names that SLURM gives them."""
        submitit = _submitit()
        folder.mkdir(parents=True, exist_ok=True)
        task = folder.resolve() / "task.sh"
        task.write_text(TASK)
        python = [sys.executable, "-P", "-m", "recipes.launcher.job_main"]
        nodes, per_node, on_gpus = shape
        options = {name: value for name, value in self._options.items() if value is not None}
        gpus = per_node if on_gpus else 0
        if self._gpus_per_node is not None:
            gpus = self._gpus_per_node
        if gpus > 0:
            options = {"gpus-per-node": gpus} | options
        srun_args = ["--kill-on-bad-exit=1"]
        if "cpus-per-task" in options:  # which srun does not take over by itself
            srun_args.append(f"--cpus-per-task={options['cpus-per-task']}")
        with job_environ():
            executor = submitit.SlurmExecutor(
                folder.resolve(),
                python=f"sh {shlex.quote(str(task))} {shlex.quote(sys.executable)} -P",
            )
            executor.update_parameters(
                job_name=_JOB_NAME,
                nodes=nodes,
                ntasks_per_node=per_node,
                time=None,
                wckey=None,
                stderr_to_stdout=True,
                srun_args=srun_args,
                array_parallelism=self.max_jobs or len(jobs),
                additional_parameters=options,
                setup=[before_ranks(folder), *self._setup],
                teardown=after_ranks(folder),
            )
            files = [str(job.file.resolve()) for job in jobs]
            try:
                with executor.batch():
                    submitted = [
                        executor.submit(os.execv, python[0], [*python, file]) for file in files
                    ]
            except submitit.core.utils.FailedJobError as error:
                raise ConfigError(
                    "launcher=slurm", f"sbatch refuses it: {error}", "launcher.<what it names>=…"
                ) from error
        return [str(one.job_id) for one in submitted]


_Shape = tuple[int, int, bool]


class _Submitted:
    """A job in SLURM's queue."""

    def __init__(self, job: Job, queue: Queue) -> None:
        assert job.cluster_job is not None, "it has been submitted"
        self.job = job
        self._queue = queue
        self._name = job.cluster_job
        self._is_cancelled = False

    def poll(self) -> int | None:
        return self._queue.worst_exit_code(self._name)

    def is_waiting(self) -> bool:
        return self._queue.is_waiting(self._name)

    def ask(self, number: int) -> None:
        """By scancel, which tells the ranks to save and end, and not to be queued again."""
        if not self._is_cancelled:
            subprocess.run(["scancel", self._name], check=False, capture_output=True)
            self._is_cancelled = True

    def kill(self) -> None:
        self.ask(signal.SIGKILL)


def _ranks_of(job: Job) -> tuple[int, int]:
    """Nodes, and ranks on each: of a cluster, whose GPUs cannot be counted from here.

    Raises:
        ConfigError: It does not say how many.
    """
    assert job.composed is not None
    config = job.composed.config
    trainer = config["trainer"]
    if not get_traits(config["strategy"]).needs_process_group:
        return 1, 1
    devices = trainer["devices"]
    if devices in ("auto", -1):
        raise ConfigError(
            f"launcher=slurm trainer.devices={devices}",
            "how many GPUs a node of the cluster has cannot be seen from here",
            "trainer.devices=<GPUs a node>",
        )
    per_node = len(devices) if isinstance(devices, list) else int(devices)
    return int(trainer["num_nodes"]), per_node


def _shape_of(job: Job) -> _Shape:
    """What an array has in common: nodes, ranks on each, whether they want GPUs."""
    assert job.composed is not None
    nodes, per_node = _ranks_of(job)
    return nodes, per_node, job.composed.config["trainer"]["accelerator"] != "cpu"


def _submitit() -> Any:
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "launcher=slurm", "this machine has no sbatch", "launcher=local, or from a login node"
        )
    try:
        import submitit
    except ImportError as error:
        raise ConfigError(
            "launcher=slurm", "submitit is not installed", "pip install -e '.[slurm]'"
        ) from error
    return submitit
