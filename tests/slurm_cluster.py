"""A real SLURM cluster on this machine: munged, slurmctld and slurmd as plain processes, all files in one folder."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from slurm_install import path_with_daemons

_GRACE_SECONDS = 20
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}

# Always four processors (`config_overrides`), and two partitions: a job in `high` preempts one in `low`, which is
# requeued after its grace time. `cred_expire` is also how long a requeued job waits before it may start again, 120 s
# by default.
_CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={control_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=2
MessageTimeout=60
MailProg=/bin/true
InactiveLimit=0
MinJobAge=600
ReturnToService=2
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/finished.txt
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=65536 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes={host} PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """One node with four processors and the partitions `low` (default) and `high`; starts in a second.

    Commands need `environment` to reach the cluster. A preempted job in `low` gets SIGCONT and SIGTERM at once, in its
    tasks but not in its batch script, and is killed after the grace time.

    Args:
        folder: Folder for configuration, state and logs.
        grace_seconds: Seconds between signaling and killing a preempted job in `low`.
        more_config: Additional lines for `slurm.conf`.
    """

    def __init__(self, folder: Path, *, grace_seconds: int = _GRACE_SECONDS, more_config: str = "") -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        config = str(folder / "slurm.conf")
        self.environment = clean | {"SLURM_CONF": config, "PATH": path_with_daemons()}
        self._write_config(grace_seconds, more_config)
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def submit(self, *args: str, folder: Path | None = None) -> str:
        """Run `sbatch`.

        Args:
            args: Options, then the script and its arguments; or `--wrap=command`.
            folder: Working directory and log folder of the job; None uses the cluster's folder.

        Returns:
            The id of the job or array.
        """
        chdir = f"--chdir={folder or self.folder}"
        return self.query("sbatch", "--parsable", chdir, *args).split(";")[0].strip()

    def query(self, *command: str) -> str:
        """Return the output of a SLURM command; an error includes the logs of the daemons."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr or done.stdout}\n{self.logs()}"
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of `scontrol show job` for one job: `7`, or `7_1` of an array."""
        line = self.query("scontrol", "--oneliner", "show", "job", job_id).splitlines()[0]
        return dict(field.split("=", 1) for field in line.split() if "=" in field)

    def wait(self, job_id: str, *states: str, timeout_seconds: float = 120.0, restarts: int = 0) -> dict[str, str]:
        """Wait until the job is in one of the given states.

        Args:
            job_id: Same as for `job`.
            states: SLURM's names: `RUNNING`, `PENDING`, `COMPLETED`, `FAILED`, `CANCELLED` …
            timeout_seconds: Time limit.
            restarts: Minimum number of times that the job must have been requeued.

        Returns:
            The fields of `job` at that time.

        Raises:
            AssertionError: The job ended in another state.
        """
        seen: dict[str, str] = {}

        def reached() -> bool:
            seen.update(self.job(job_id))
            is_reached = seen["JobState"] in states and int(seen["Restarts"]) >= restarts
            assert is_reached or seen["JobState"] not in _ENDED, f"{seen}\n{self.logs()}"
            return is_reached

        self.until(reached, f"job {job_id} in {states}", timeout_seconds, lambda: str(seen))
        return seen

    def until(
        self,
        reached: Callable[[], bool],
        what: str,
        timeout_seconds: float = 20.0,
        describe: Callable[[], str] = str,
    ) -> None:
        """Wait for a condition while the daemons are running.

        Args:
            reached: Returns whether the condition holds.
            what: Name of the condition, for the error.
            timeout_seconds: Time limit.
            describe: Returns details for the error.

        Raises:
            TimeoutError: The time limit is exceeded, or a daemon has exited.
        """
        end = time.monotonic() + timeout_seconds
        while not reached():
            dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if dead or time.monotonic() > end:
                details = f"daemons that ended: {dead}\n{describe()}\n{self.logs()}"
                raise TimeoutError(f"{what}: not within {timeout_seconds} s\n{details}")
            time.sleep(0.05)

    def queue(self) -> str:
        """Return all pending and running jobs, one per line."""
        return self.query("squeue", "--noheader", "--array")

    def logs(self) -> str:
        """Return the last lines of each daemon's log."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-4000:]}" for f in files)

    def end(self) -> None:
        """Kill every job, every daemon, and every process left over from a job."""
        while left := self.living():
            for pid in left:
                _kill(pid)
            time.sleep(0.01)
        for daemon in self._daemons:
            daemon.wait()

    def living(self) -> list[int]:
        """Return the processes of the cluster and its jobs, identified by its folder in their environment."""
        mark, found = f"{self.folder}/".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes()
            except OSError:
                continue
            if mark in environment and int(process.name) != os.getpid():
                found.append(int(process.name))
        return found

    def _write_config(self, grace_seconds: int, more_config: str) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        control_port, node_port = _free_ports()
        config = _CONFIG.format(
            folder=self.folder,
            host=_host(),
            user=pwd.getpwuid(os.geteuid()).pw_name,
            control_port=control_port,
            node_port=node_port,
            grace=grace_seconds,
        )
        (self.folder / "slurm.conf").write_text(f"{config}{more_config}\n")
        (self.folder / "cgroup.conf").touch()

    def _start(self) -> None:
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        munge = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        # --force: munged complains about a folder that other users cannot read, such as a test's
        self._daemon("munged", "--force", "--foreground", *munge)
        self.until((self.folder / "munge.socket").exists, "the socket of munged")
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D", "-N", _host())
        self.until(self._node_is_idle, "the node to be idle", 60.0)

    def _daemon(self, name: str, *args: str) -> None:
        program = shutil.which(name, path=self.environment["PATH"])
        assert program is not None, name
        with (self.folder / f"{name}.log").open("w") as log:
            daemon = subprocess.Popen([program, *args], env=self.environment, stdout=log, stderr=log, cwd=self.folder)
        self._daemons.append(daemon)

    def _node_is_idle(self) -> bool:
        command = ("sinfo", "--noheader", "--partition=low", "--format=%T")
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout.strip() == "idle"


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
