"""How many processes carry a run, and who started them: read from config and environment. No torch without a GPU."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recipes.errors import ConfigError

Starter = Literal["torchrun", "slurm", "us"]

RANK_FILE = (
    "RECIPES_RANK_FILE"  # names the composed run, in the environment of the ranks that we start
)
TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_SIGNS_OF_A_GPU = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes of a run.

    Attributes:
        per_node: Processes on each machine, one a device.
        num_nodes: Machines.
        started_by: Who started them; None: nobody yet.
    """

    per_node: int
    num_nodes: int
    started_by: Starter | None

    @property
    def world_size(self) -> int:
        return self.per_node * self.num_nodes


def started_by(environ: Mapping[str, str] = os.environ) -> Starter | None:
    """Who started this process as one of the ranks of a run; None: it is no rank."""
    if environ.get(RANK_FILE):
        return "us"
    if all(name in environ for name in TORCHRUN_VARIABLES):
        return "torchrun"
    # srun says it to each task; a plain command in a batch script, itself a step of one task, has no more than 1
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in environ:
        return "slurm"
    return None


def global_rank(environ: Mapping[str, str] = os.environ) -> int:
    """The rank of this process, 0 where nobody started ranks."""
    starter = started_by(environ)
    if starter is None:
        return 0
    return int(environ["SLURM_PROCID" if starter == "slurm" else "RANK"])


def num_gpus() -> int:
    """GPUs that torch sees; torch is asked only where there is a sign of a driver."""
    if not any(Path(sign).exists() for sign in _SIGNS_OF_A_GPU):
        return 0
    import torch

    return torch.cuda.device_count()


def existing_ranks(environ: Mapping[str, str]) -> Ranks | None:
    starter = started_by(environ)
    if starter is None:
        return None
    if starter == "slurm":
        on_nodes = _tasks_on_nodes(environ)
    else:
        world_size, per_node = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
        num_nodes = int(environ.get("GROUP_WORLD_SIZE", world_size // per_node))  # agents
        rest = world_size - per_node * (num_nodes - 1)
        on_nodes = [per_node] * (num_nodes - 1) + [rest]
    if len(set(on_nodes)) > 1:
        raise ConfigError(
            f"{describe_starter(starter)} {' + '.join(map(str, on_nodes))} ranks",
            "every node must have the same number of them",
            "torchrun --nproc-per-node <the same number on each node>, or srun --ntasks-per-node",
        )
    return Ranks(per_node=on_nodes[0], num_nodes=len(on_nodes), started_by=starter)


def _tasks_on_nodes(environ: Mapping[str, str]) -> list[int]:
    """SLURM's tasks of this step on each node: `2(x3),1` is 2, 2, 2 and 1."""
    num_tasks = int(environ["SLURM_STEP_NUM_TASKS"])
    told = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if told is None:  # older than the step's own: the same number on each node
        per_node = int(environ.get("SLURM_NTASKS_PER_NODE", num_tasks))
        return [per_node] * (num_tasks // per_node)
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", told)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def describe_starter(starter: Starter) -> str:
    return {"torchrun": "torchrun started", "slurm": "srun started", "us": "this run has"}[starter]
