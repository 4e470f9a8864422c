"""Read the processes of a run and their launcher from the environment. No torch without a GPU driver."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recipes.errors import ConfigError

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
_COUNTS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_PORT", *_SLURM_COUNTS)
# variable -> the one that it is smaller than
_INDICES = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}
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
    read = [*_COUNTS, *_INDICES] if is_rank else ["WORLD_SIZE", *_SLURM_COUNTS]
    wrong = []
    for name in read:
        least, most = (0, environ.get(_INDICES[name])) if name in _INDICES else (1, None)
        value = environ.get(name)
        if value is None:
            continue
        if not value.isdecimal() or int(value) < least:
            what = f"a whole number from {least} on"
            wrong.append(ConfigError(f"{name}={value}", f"torchrun and srun set {what}", f"unset {name}"))
        elif most is not None and most.isdecimal() and int(value) >= int(most):
            reason = f"ranks count from 0, and {_INDICES[name]} is {most}"
            wrong.append(ConfigError(f"{name}={value}", reason, f"unset {name}"))
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if tasks is not None and not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", tasks):
        reason = "SLURM sets numbers such as 2(x3),1"
        wrong.append(ConfigError(f"SLURM_STEP_TASKS_PER_NODE={tasks}", reason, "ignore_slurm=true"))
    return wrong


def describe_starter(starter: Starter) -> str:
    """Return the start of an error message, as in `torchrun started 4 ranks`."""
    descriptions = {
        "torchrun": "torchrun started",
        "slurm": "srun started",
        "spawn": "this run has",
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
        num_nodes = int(environ.get("GROUP_WORLD_SIZE", world_size // per_node))
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
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node)
    return [int(tasks) for tasks, times in groups for _ in range(int(times or 1))]
