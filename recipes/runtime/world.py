"""Read the processes of a run and their launcher from the environment. No torch without a GPU driver."""

import contextlib
import math
import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recipes.errors import ConfigError, type_command

Starter = Literal["torchrun", "slurm", "spawn"]

# path of the composed run, in the environment of the ranks that recipes/entry/spawn.py starts
RANK_FILE = "RECIPES_RANK_FILE"
TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_SLURM_COUNTS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE")
_COUNTS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_PORT")
# variable -> the one that it is smaller than
_INDICES = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}
_MAX_DIGITS, _LAST_PORT = 9, 65535
_MAX_SHOWN = 40  # characters of a variable in an error
_HOST = re.compile(r"[\w.:%\[\]-]+")  # a name, or an address of either kind
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_SLURM_INDICES = {
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID": "SLURM_STEP_NUM_TASKS",
    "SLURM_NODEID": "SLURM_STEP_NUM_TASKS",
}
# set by torchrun and by this project for each rank, besides those above
_OF_TORCHRUN = ("NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
OWN_VARIABLES = (*TORCHRUN_VARIABLES, *_OF_TORCHRUN, "CROSS_RANK", "CROSS_SIZE")
OWN_PREFIX = "TORCHELASTIC_"
# of launchers whose processes are not ranks of a run: MPI, PMI and PMIx, LSF, Horovod, PALS, Flux
_SIZES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    "HOROVOD_SIZE",
    "FLUX_JOB_SIZE",
)
_GLOBAL_RANKS = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMI_ID",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "HOROVOD_RANK",
    "PALS_RANKID",
    "ALPS_APP_PE",
    "FLUX_TASK_RANK",
)
_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_RANK",
    "HOROVOD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
)
_LOCAL_SIZES = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
    "HOROVOD_LOCAL_SIZE",
)
FOREIGN_VARIABLES = (*_SIZES, *_GLOBAL_RANKS, *_LOCAL_RANKS, *_LOCAL_SIZES)
# of a task of srun; the others, such as SLURM_JOB_ID, belong to the whole job
_SLURM_TASK_VARIABLES = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
)
_SHELLS = ("bash", "sh", "dash", "zsh", "fish", "ksh", "csh", "tcsh")
_TERMINAL = re.compile(r"/dev/(pts/\d+|tty\w*|console)")
_GPU_DRIVER_PATHS = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes of a run.

    Attributes:
        per_node: Processes on each node, one per device.
        num_nodes: Number of nodes.
        started_by: Launcher that started them; None if they have not been started yet.
    """

    per_node: int
    num_nodes: int
    started_by: Starter | None

    @property
    def world_size(self) -> int:
        return self.per_node * self.num_nodes


def started_by(environ: Mapping[str, str] = os.environ) -> Starter | None:
    """Return the launcher that started this process as a rank; None if it is not a rank."""
    if environ.get(RANK_FILE):
        return "spawn"
    if all(name in environ for name in TORCHRUN_VARIABLES):
        return "torchrun"
    # srun sets it in each task; a plain command in a batch script is a step of one task
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in environ:
        return "slurm"
    return None


def find_wrong_variables(environ: Mapping[str, str] = os.environ) -> list[ConfigError]:
    """Return errors for rank variables that torchrun or SLURM cannot have set, such as leftovers.

    The functions below parse them as integers; the entry point calls this first.
    """
    if environ.get(RANK_FILE):  # ranks of this project start in recipes/entry/rank_main.py
        reason = "it marks a process that a run has started, and this one was not"
        return [ConfigError(f"{RANK_FILE}={environ[RANK_FILE]}", reason, f"unset {RANK_FILE}")]
    is_rank = all(name in environ for name in TORCHRUN_VARIABLES)
    read = [*_COUNTS, *_INDICES] if is_rank else ["WORLD_SIZE"]
    of_slurm = [] if is_rank else [*_SLURM_COUNTS]
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if of_slurm and (not num_tasks.isdecimal() or int(num_tasks) > 1):
        of_slurm += _SLURM_INDICES
    smaller_than = _INDICES | _SLURM_INDICES
    wrong = []
    left = [name for name in TORCHRUN_VARIABLES if name in environ]
    for name in [*read, *of_slurm]:
        least, most = (0, environ.get(smaller_than[name])) if name in smaller_than else (1, None)
        value = environ.get(name)
        if value is None:
            continue
        shown = f"{name}={value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + '…'}"
        if not _is_count(value) or int(value) < least or (name == "MASTER_PORT" and int(value) > _LAST_PORT):
            what = "a port up to 65535" if name == "MASTER_PORT" else f"a whole number from {least} on"
            wrong.append(ConfigError(shown, f"torchrun and srun set {what}", f"unset {_and_others(name, left)}"))
        elif most is not None and _is_count(most) and int(value) >= int(most):
            reason = f"ranks count from 0, and {smaller_than[name]} is {most}"
            wrong.append(ConfigError(shown, reason, f"unset {_and_others(name, left)}"))
    address = environ.get("MASTER_ADDR", "localhost")
    if is_rank and not _HOST.fullmatch(address):
        fix = "export MASTER_ADDR=<the host of rank 0>"
        wrong.append(ConfigError(f"MASTER_ADDR={address}", "it is not the name or address of a host", fix))
    wrong += _find_wrong_sizes(environ) if is_rank and not wrong else []
    return [*wrong, *_find_wrong_tasks(environ)]


def _and_others(name: str, left: Sequence[str]) -> str:
    """Return a variable of torchrun with the others that are set, which alone would be a mistake again."""
    return " ".join(left if name in left else [name])


def _find_wrong_sizes(environ: Mapping[str, str]) -> list[ConfigError]:
    """Check that the ranks divide over nodes: otherwise they would wait for some that nobody has started."""
    world_size, per_node = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
    if per_node <= world_size and ("GROUP_WORLD_SIZE" in environ or world_size % per_node == 0):
        return []
    reason = f"{world_size} ranks in all are no multiple of {per_node} on each node"
    fix = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE, or torchrun --nproc-per-node <ranks> train.py …"
    return [ConfigError(f"WORLD_SIZE={world_size} LOCAL_WORLD_SIZE={per_node}", reason, fix)]


def reject_missing_interface(environ: Mapping[str, str] = os.environ) -> None:
    """Reject a network interface for gloo that this machine does not have.

    Raises:
        ConfigError: `GLOO_SOCKET_IFNAME` names another one.
    """
    named = [name for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    known = [name for _, name in socket.if_nameindex()]
    if not set(named) <= set(known):
        reason = f"this machine has the network interfaces {' '.join(known)}"
        raise ConfigError(f"GLOO_SOCKET_IFNAME={','.join(named)}", reason, "unset GLOO_SOCKET_IFNAME")


def _is_count(text: str) -> bool:
    """Return whether a text is a whole number, of a size that ranks and ports have."""
    return text.isdecimal() and len(text) <= _MAX_DIGITS


def _find_wrong_tasks(environ: Mapping[str, str]) -> list[ConfigError]:
    """Check `2(x3),1` by arithmetic alone: it can stand for more numbers than the memory holds."""
    tasks, num_tasks = environ.get("SLURM_STEP_TASKS_PER_NODE"), environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks is None:
        return []
    reason = "SLURM sets numbers such as 2(x3),1"
    if re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", tasks):
        groups = [[int(number[:_MAX_DIGITS]) for number in group if number] for group in _TASKS.findall(tasks)]
        total = sum(math.prod(group) for group in groups)
        if not _is_count(num_tasks) or int(num_tasks) <= 1 or total == int(num_tasks):
            return []
        reason = f"these are {total} tasks, and SLURM_STEP_NUM_TASKS is {num_tasks}"
    shown = tasks if len(tasks) <= _MAX_SHOWN else tasks[:_MAX_SHOWN] + "…"
    return [ConfigError(f"SLURM_STEP_TASKS_PER_NODE={shown}", reason, "ignore_slurm=true")]


def reject_other_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Reject a process that no launcher of this project has started, but an MPI launcher together with others.

    Raises:
        ConfigError: Each of these processes would train the whole run.
    """
    for name in [] if started_by(environ) else _several_processes(environ):
        reason = "an MPI launcher starts no ranks of this project: each process would train the whole run"
        fix = f"torchrun --nproc-per-node <ranks> train.py …; in a shell inside an MPI job: unset {name}"
        raise ConfigError(f"{name}={environ[name]}", reason, fix)


def _several_processes(environ: Mapping[str, str]) -> list[str]:
    """Return the variables by which an MPI launcher says that there are several processes."""
    return [name for name in _SIZES if (size := environ.get(name, "1")).isdecimal() and int(size) > 1]


def settle_ranks(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Make the environment say about this process's rank what this module says; return a line for each correction.

    Lightning, torchmetrics, DeepSpeed, accelerate and others read a rank from variables of their own choice, some of
    them on import: `LOCAL_RANK` left in a shell makes Lightning's loggers silent in a run that is no rank. Call it
    once, after `find_wrong_variables` and before anything else imports torch or Lightning.
    """
    lines = []
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and _is_in_shell_of_srun(environ):
        num_tasks = environ["SLURM_STEP_NUM_TASKS"]
        for name in (*_SLURM_TASK_VARIABLES, *FOREIGN_VARIABLES):
            environ.pop(name, None)
        lines.append(
            f"This is an interactive shell of srun (SLURM_STEP_NUM_TASKS={num_tasks}): this command starts its own"
            f" ranks; ignore_slurm=true makes this explicit, srun {type_command('…')} starts them by SLURM"
        )
    starter = started_by(environ)
    if starter is None:
        # none of these has a meaning; several processes are rejected together with the config, which names what is set
        is_one = int(environ.get("WORLD_SIZE", "1")) == 1
        left = [name for name in environ if name in OWN_VARIABLES and is_one]
        left += [name for name in FOREIGN_VARIABLES if name in environ and name not in _several_processes(environ)]
        left += [name for name in _SLURM_INDICES if environ.get(name, "0") != "0"]
        why, speaks = "no launcher has started this process as a rank", True
    else:
        answers = _get_answers(environ, starter)
        left = [name for name, answer in answers.items() if environ.get(name, answer) != answer]
        rank = global_rank(environ)
        why, speaks = f"{describe_starter(starter)} this process as rank {rank}", rank < 2  # not one line per rank
    settings = " ".join(f"{name}={environ.pop(name)}" for name in sorted(left))
    if starter in (None, "slurm"):
        for name in [name for name in environ if name.startswith(OWN_PREFIX)]:  # torch reads its store from there
            del environ[name]
    if starter == "slurm":
        # Lightning requires both, and srun sets the second one only if its option of that name is used
        environ["SLURM_NTASKS"] = environ["SLURM_STEP_NUM_TASKS"]
        environ["SLURM_NTASKS_PER_NODE"] = str(_slurm_tasks_by_node(environ)[0])
    if settings and speaks:
        lines.append(f"Ignored from the environment: {settings}: {why}")
    return lines


def _get_answers(environ: Mapping[str, str], starter: Starter) -> dict[str, str]:
    """Return what the rank variables of other launchers must say to agree with this one."""
    rank = str(global_rank(environ))
    if starter == "slurm":
        by_node = _slurm_tasks_by_node(environ)
        size, local_size = environ["SLURM_STEP_NUM_TASKS"], str(by_node[0])
        local_rank, node = environ.get("SLURM_LOCALID"), environ.get("SLURM_NODEID")
        names = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local_size}
        names |= {"NODE_RANK": node, "GROUP_RANK": node}
    else:
        size, local_size, local_rank = environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"], environ["LOCAL_RANK"]
        names = {"NODE_RANK": environ.get("GROUP_RANK")}
    names |= dict.fromkeys(_SIZES, size) | dict.fromkeys(_GLOBAL_RANKS, rank)
    names |= dict.fromkeys(_LOCAL_RANKS, local_rank) | dict.fromkeys(_LOCAL_SIZES, local_size)
    return {name: answer for name, answer in names.items() if answer is not None}


def _is_in_shell_of_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun has started an interactive shell, from which this command was typed.

    All tasks of `srun --ntasks-per-node=2 --pty bash` run a shell, of which one has a terminal. A command in it has the
    variables of a task, and nobody starts the other ranks. Only a terminal proves it: `srun bash <<EOF` runs a shell
    in each task, too, and in it the ranks. The name of the job does not: that of `salloc bash` is the shell's. When
    undecided, the process is a rank, and says after seconds for which other ones it waits.
    """
    task = environ.get("SLURM_TASK_PID", "")
    if task == str(os.getpid()):
        return False
    has_terminal = "SLURM_PTY_PORT" in environ  # of `srun --pty`
    arguments = _read_arguments_of_ancestor(int(task)) if task.isdecimal() else None
    if arguments is None:  # another machine, or a container with its own process ids
        return has_terminal
    with contextlib.suppress(OSError):  # of another user
        # commands inside `srun --pty` inherit its variables: the task's own standard input decides
        has_terminal = _TERMINAL.fullmatch(os.readlink(f"/proc/{task}/fd/0")) is not None
    program, *rest = arguments
    is_shell = Path(program).name.removeprefix("-") in _SHELLS
    return has_terminal and is_shell and all(option.startswith(("-", "+")) and option != "-c" for option in rest)


def _read_arguments_of_ancestor(wanted: int) -> list[str] | None:
    """Return the command line of a process if this one descends from it."""
    process = os.getppid()
    while process > 1 and process != wanted:
        try:
            stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        process = int(stat.rpartition(")")[2].split()[1])  # the name before it may contain spaces
    try:
        text = Path(f"/proc/{wanted}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return text.rstrip("\0").split("\0") if process == wanted and text else None


def describe_starter(starter: Starter) -> str:
    """Return the start of an error message, as in `torchrun started 4 ranks`."""
    descriptions = {
        "torchrun": "torchrun started",
        "slurm": "srun started",
        "spawn": "this run started",
    }
    return descriptions[starter]


def global_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return the rank of this process; 0 if it is not a rank."""
    starter = started_by(environ)
    if starter is None:
        return 0
    return int(environ["SLURM_PROCID" if starter == "slurm" else "RANK"])


def num_gpus() -> int:
    """Return the number of GPUs that torch sees; imports torch only if there is a driver."""
    if not any(Path(path).exists() for path in _GPU_DRIVER_PATHS):
        return 0
    import torch

    return torch.cuda.device_count()


def num_cores() -> int:
    """Return the cores that this process may use; in a container or SLURM task fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_own_gpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether SLURM gives each task one GPU and hides the others, as with `--gpus-per-task=1`.

    Each task then sees one GPU, with the index 0.
    """
    if started_by(environ) != "slurm":
        return False
    # set by srun if the options of these names are used; SLURM 24.05 writes the first as gres/gpu
    per_task = environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]  # a number, or type:number
    tres = re.search(r"gres/gpu(?::[\w.-]+)?[:=](\d+)", environ.get("SLURM_TRES_PER_TASK", ""))
    return "1" in (per_task, tres[1] if tres else None, environ.get("SLURM_NTASKS_PER_GPU"))


def existing_ranks(environ: Mapping[str, str]) -> Ranks | None:
    """Return the ranks that this process belongs to; None if it is not a rank.

    Raises:
        ConfigError: The number of ranks differs between nodes.
    """
    starter = started_by(environ)
    if starter is None:
        return None
    if starter == "slurm":
        ranks_by_node = _slurm_tasks_by_node(environ)
    else:
        world_size, per_node = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
        # torchrun's agents, one per node
        num_nodes = int(environ.get("GROUP_WORLD_SIZE", -(-world_size // per_node)))
        # this node's count and the total are known: any difference shows up in the last node
        rest = world_size - per_node * (num_nodes - 1)
        ranks_by_node = [per_node] * (num_nodes - 1) + [rest]
    if len(set(ranks_by_node)) > 1:
        raise ConfigError(
            f"{describe_starter(starter)} {' + '.join(map(str, ranks_by_node))} ranks",
            "every node must have the same number of them",
            "torchrun --nproc-per-node <the same number on each node>, or srun --ntasks-per-node",
        )
    return Ranks(per_node=ranks_by_node[0], num_nodes=len(ranks_by_node), started_by=starter)


def _slurm_tasks_by_node(environ: Mapping[str, str]) -> list[int]:
    """Return the number of SLURM tasks of this step on each node: `2(x3),1` is 2, 2, 2 and 1."""
    num_tasks = int(environ["SLURM_STEP_NUM_TASKS"])
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if tasks_per_node is None:  # older SLURM: the same number on each node
        per_node = int(environ.get("SLURM_NTASKS_PER_NODE", num_tasks))
        return [per_node] * (num_tasks // per_node)
    return [int(tasks) for tasks, times in _TASKS.findall(tasks_per_node) for _ in range(int(times or 1))]
