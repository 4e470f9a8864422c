"""Run single runs and sweeps as SLURM jobs; a preempted job is requeued and resumes under its id."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar

from recipes.errors import ConfigError, type_extra
from recipes.files import write_atomically
from recipes.launcher import Handle
from recipes.launcher.environ import clean_environ
from recipes.launcher.job import Job
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.process import python_path

# Track SLURM jobs through squeue, queried for all of them every few seconds, and through their exit code files.

_QUERY_SECONDS = 2.0
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING")
_ENDED = ("COMPLETED", "FAILED")
# ended from outside: reported as killed, so that the job can resume
_CUT = ("BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
_KILLED = -9
_NO_ANSWER_SECONDS = 60.0  # timeout for squeue to answer
_FILE_DELAY_SECONDS = 10.0  # until a network file system shows an exit code written on another machine


class Queue:
    """Tracks the SLURM jobs of one sweep.

    Args:
        folder: Folder with the jobs' scripts and exit codes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[str, str] = {}
        self._queried_at = float("-inf")
        self._ended_at: dict[str, float] = {}  # job id -> time at which it was first seen ended without an exit code
        self._job_ids: set[str] = set()
        self._has_answered = False  # whether the last query succeeded

    def select_open(self, job_ids: Sequence[str]) -> set[str]:
        """Return the jobs that are waiting or running, or have ended by themselves with an exit code still to be read.

        Raises:
            ConfigError: SLURM does not answer, so it is unknown whether the jobs are running.
        """
        if not job_ids:
            return set()
        self._job_ids |= set(job_ids)
        deadline = time.monotonic() + _NO_ANSWER_SECONDS
        while not self._query():
            if time.monotonic() > deadline:
                raise ConfigError(
                    "launcher=slurm",
                    f"squeue does not answer, and {', '.join(job_ids)} may be running",
                    "the same command again, when SLURM answers",
                )
            time.sleep(_QUERY_SECONDS)
        return {job_id for job_id in job_ids if self._is_open(job_id)}

    def _is_open(self, job_id: str) -> bool:
        state = self._states[job_id] if job_id in self._states else None
        if state is None or state in _ENDED:
            return self._read_exit_code(job_id) is not None
        return state not in _CUT

    def is_waiting(self, job_id: str) -> bool:
        """Return whether a job is waiting in the queue."""
        return self._get_state(job_id) in _WAITING

    def worst_exit_code(self, job_id: str) -> int | None:
        """Return the worst exit code of a job's ranks; None if it has not ended or will restart."""
        state = self._get_state(job_id)
        if not self._has_answered:
            return None
        if state in _CUT:
            return _KILLED
        if state is not None and state not in _ENDED:
            self._ended_at.pop(job_id, None)
            return None
        code = self._read_exit_code(job_id)
        if code is not None:
            return code
        # ended, or forgotten by SLURM, without an exit code file: not visible yet, or never written
        ended_at = self._ended_at.setdefault(job_id, time.monotonic())
        if time.monotonic() - ended_at < _FILE_DELAY_SECONDS:
            return None
        return 0 if state == "COMPLETED" else _KILLED

    def _get_state(self, job_id: str) -> str | None:
        """Return SLURM's name for the job's state; None if SLURM does not know the job, or has forgotten it."""
        is_new = job_id not in self._job_ids
        self._job_ids.add(job_id)
        if is_new or time.monotonic() - self._queried_at > _QUERY_SECONDS:
            self._query()
        return self._states[job_id] if job_id in self._states else None

    def _query(self) -> bool:
        """Update the states through squeue; return whether it answered, otherwise keep the previous states."""
        job_ids = ",".join(sorted(self._job_ids))
        command = ["squeue", "--states=all", "--array", "--noheader", "--format=%i|%T"]
        result = subprocess.run([*command, f"--jobs={job_ids}"], capture_output=True, text=True, check=False)
        self._queried_at = time.monotonic()
        # squeue fails if its only job is forgotten, but omits a forgotten job among several
        self._has_answered = not result.returncode or "Invalid job id" in result.stderr
        if not self._has_answered:
            return False  # the controller is busy or restarting
        pairs = (line.strip().split("|") for line in result.stdout.splitlines() if "|" in line)
        self._states = {job_id: state.split()[0] for job_id, state in pairs}
        return True

    def _read_exit_code(self, job_id: str) -> int | None:
        """Read the exit code file of the batch script (see slurm_script.py) and restore the run's own exit code."""
        try:
            text = (self._folder / f"code_{job_id}").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        if not re.fullmatch(r"\d+", text):
            return None  # partially written
        code = int(text)
        if 128 < code < 160:  # killed by a signal, as reported by a shell
            return 128 - code
        return code - 100 if code >= 100 else code


FOLDER = "slurm"  # next to the job folders: scripts, logs, exit codes
_JOB_NAME = "lightning_recipes"


class Slurm:
    """Submits jobs through submitit and follows them in the queue.

    Args:
        partition: SLURM partition; None: the cluster's default.
        time: Time limit in minutes or in sbatch's own format; None: the partition's default.
        cpus_per_task: Cores per rank; None: the cluster's default.
        gpus_per_node: GPUs to request per node; None: one per rank, or none with `trainer.accelerator=cpu`.
        max_jobs: Maximum number of parallel jobs of a sweep; None: no limit.
        signal_seconds: Seconds before the time limit at which SLURM signals the run to save and be requeued.
        setup: Shell lines to run before the ranks start, such as loading modules.
        directives: Further sbatch options by their long names, such as `{account: a, constraint: h100}`.
        wait: Whether to follow a sweep's jobs until they end; False: submit them and return.
    """

    runs_elsewhere: ClassVar[bool] = True  # read from source by the config check

    def __init__(
        self,
        *,
        partition: str | None,
        time: Annotated[int, ">= 1"] | str | None,
        cpus_per_task: Annotated[int, ">= 1"] | None,
        gpus_per_node: Annotated[int, ">= 0"] | None,
        max_jobs: Annotated[int, ">= 1"] | None,
        signal_seconds: Annotated[int, ">= 1"],
        setup: list[str],
        directives: dict[str, Any],
        wait: bool,
    ) -> None:
        self.max_jobs = max_jobs
        self.waits = wait
        self.limits_concurrency = wait and max_jobs is not None
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

    def extra_overrides(self, job: Job) -> list[str]:
        return []

    def num_devices(self, job: Job) -> int:
        nodes, per_node = _num_nodes_and_ranks(job)
        return nodes * per_node

    def is_full(self) -> bool:
        if self.max_jobs is None:
            return False
        return sum(job.poll() is None for job in self._started) >= self.max_jobs

    def start(self, waiting: Sequence[Job]) -> list[Handle]:
        """Submit jobs, one array per resource request; jobs that are already in the queue are only followed."""
        if not waiting:
            return []
        folder = waiting[0].folder.parent / FOLDER
        queue = self._queues.setdefault(folder, Queue(folder))
        # a job with a recorded exit code has ended; the exit code file in the folder is not from this start
        open_jobs = {job.number: job.cluster_job for job in waiting if job.exit_code is None}
        queued = queue.select_open([job_id for job_id in open_jobs.values() if job_id is not None])
        new_jobs = [job for job in waiting if job.number not in open_jobs or open_jobs[job.number] not in queued]
        for request in dict.fromkeys(_get_request(job) for job in new_jobs):
            array = [job for job in new_jobs if _get_request(job) == request]
            for job, job_id in zip(array, self._submit(array, request, folder), strict=True):
                job.cluster_job = job_id
                job.save()
        started = [_Submitted(job, queue) for job in waiting]
        self._started += started
        return list(started)

    def log_path(self, job: Job) -> Path:
        """Return the file with the console output of a job's rank 0."""
        return job.folder.parent / FOLDER / f"{job.cluster_job}_0_log.out"

    def describe(self) -> str:
        partition = self._options["partition"]
        suffix = f" in partition {partition}" if partition else ""
        return f"by SLURM{suffix}" + (f", {self.max_jobs} at a time" if self.max_jobs else "")

    def _submit(self, jobs: Sequence[Job], request: "_Request", folder: Path) -> list[str]:
        """Submit jobs as one array; return their SLURM ids."""
        submitit = _import_submitit()
        folder.mkdir(parents=True, exist_ok=True)
        task = folder.resolve() / "task.sh"
        write_atomically(task, TASK)
        python = [sys.executable, "-P", "-m", "recipes.launcher.job_main"]
        nodes, per_node, on_gpus = request
        options = {name: value for name, value in self._options.items() if value is not None}
        gpus = per_node if on_gpus else 0
        if self._gpus_per_node is not None:
            gpus = self._gpus_per_node
        if gpus > 0:
            options = {"gpus-per-node": gpus} | options
        srun_args = ["--kill-on-bad-exit=1"]  # one failed rank ends the others
        if "cpus-per-task" in options:  # srun does not inherit it from sbatch
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
                    submitted = [executor.submit(os.execv, python[0], [*python, file]) for file in files]
            except submitit.core.utils.FailedJobError as error:
                raise _explain_rejection(str(error)) from error
        return [str(job.job_id) for job in submitted]


def _explain_rejection(text: str) -> ConfigError:
    """Return what sbatch says about a job, in one line; without a cluster, no option of a job is to blame."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in text.splitlines()]
    lines = [*dict.fromkeys(line.removeprefix("fatal: ") for line in lines if line)]
    reason = "; ".join(lines)
    if _NO_CLUSTER.search(reason):
        reason = lines[-1]  # the lines before it say why
        return ConfigError(
            "launcher=slurm",
            f"sbatch reaches no cluster from this machine: {reason}",
            "launcher=local, or the same command on a login node of the cluster",
        )
    return ConfigError("launcher=slurm", f"sbatch rejects it: {reason}", "launcher.<the option it names>=…")


# of the lines of sbatch without slurmctld, or without a configuration that names it
_NO_CLUSTER = re.compile(r"configuration source|fetch config|contact(ing)? slurm controller|ctld", re.IGNORECASE)
# resources shared by the jobs of an array: nodes, ranks per node, whether they need GPUs
_Request = tuple[int, int, bool]


class _Submitted:
    """Job submitted to SLURM."""

    def __init__(self, job: Job, queue: Queue) -> None:
        assert job.cluster_job is not None, "it has been submitted"
        self.job = job
        self._queue = queue
        self._job_id = job.cluster_job
        self._is_cancelled = False

    def poll(self) -> int | None:
        return self._queue.worst_exit_code(self._job_id)

    def is_waiting(self) -> bool:
        return self._queue.is_waiting(self._job_id)

    def send_signal(self, number: int) -> None:
        """Cancel the job with scancel, whatever the signal: the ranks save and stop, and the job is not requeued."""
        if not self._is_cancelled:
            subprocess.run(["scancel", self._job_id], check=False, capture_output=True)
            self._is_cancelled = True

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _num_nodes_and_ranks(job: Job) -> tuple[int, int]:
    """Return nodes and ranks per node from the config, as the login node cannot count the cluster's GPUs.

    Raises:
        ConfigError: The config does not specify the number of devices.
    """
    assert job.composed is not None
    devices = job.composed.devices
    if not job.composed.strategy.needs_process_group:
        return 1, 1
    if devices in ("auto", -1):
        raise ConfigError(
            f"launcher=slurm trainer.devices={devices}",
            "the number of GPUs per node cannot be detected on the login node",
            "trainer.devices=<GPUs per node>",
        )
    per_node = len(devices) if isinstance(devices, list) else int(devices)
    return job.composed.num_nodes, per_node


def _get_request(job: Job) -> _Request:
    assert job.composed is not None
    nodes, per_node = _num_nodes_and_ranks(job)
    return nodes, per_node, job.composed.accelerator != "cpu"


def _import_submitit() -> Any:
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "launcher=slurm",
            "this machine has no sbatch",
            "launcher=local, or the same command on a login node",
        )
    try:
        import submitit
    except ImportError as error:
        raise ConfigError("launcher=slurm", "submitit is not installed", type_extra("slurm")) from error
    return submitit


# Shell lines around a run in a SLURM job, and the environment that sbatch exports to it.

# Runs a rank. srun returns the largest exit code of its tasks. A failed rank must not be hidden by the others, which
# are then signalled to stop and return 75, so failures get 100 added. A signal before the run listens is also 75.
TASK = f"""\
trap : TERM USR1
"$@"
code=$?
case $code in
  0|{ExitCode.PREEMPTED}) exit $code ;;
  {128 + signal.SIGUSR1}|{128 + signal.SIGTERM}) exit {ExitCode.PREEMPTED} ;;
esac
[ $code -lt 100 ] && code=$((code + 100))
exit $code
"""
# the id of an array element, not of the array: requeueing the array would requeue every job
_SET_JOB = "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; job=${job:-$SLURM_JOB_ID}"


def before_ranks(folder: Path) -> str:
    """Return the line that deletes the exit code of the job's previous start.

    Args:
        folder: Folder with the exit codes.
    """
    return f"{_SET_JOB}; rm -f {shlex.quote(str(folder.resolve()))}/code_$job"


def after_ranks(folder: Path) -> list[str]:
    """Return the lines that write the exit code and requeue a preempted job.

    scancel ends the batch script before these lines; preemption does not.

    Args:
        folder: Folder with the exit codes.
    """
    return [
        "code=$?",
        _SET_JOB,
        f"echo $code > {shlex.quote(str(folder.resolve()))}/code_$job",
        f"if [ $code = {ExitCode.PREEMPTED} ]; then scontrol requeue $job; fi",
        "exit $code",
    ]


@contextmanager
def job_environ() -> Iterator[None]:
    """Remove variables of an allocation or a rank from the environment, since sbatch exports it to the job."""
    before = dict(os.environ)
    cleaned = clean_environ() | {"PYTHONPATH": python_path()}
    try:
        os.environ.clear()
        os.environ.update(cleaned)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
