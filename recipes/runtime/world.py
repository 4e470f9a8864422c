"""How many processes carry a run, and who started them: read from config and environment. No torch without a GPU."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from recipes.errors import Mistake

Starter = Literal["torchrun", "slurm", "us"]

RANK_FILE = (
    "RECIPES_RANK_FILE"  # names the composed run, in the environment of the ranks that we start
)
_TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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


def ranks_of(config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Ranks:
    """The ranks of a composed run: those that exist, else those that it asks for.

    Raises:
        Mistake: What exists, what is asked for and what the machine has do not go together.
    """
    found = _existing(environ)
    fits = config["mode"]["_target_"].endswith(".fit")
    if not fits and found is not None and found.world_size > 1:
        _refuse_mode(config["mode"], found)
    single = config["strategy"]["_target_"].endswith("SingleDevice")
    if single:
        _refuse_several(config["trainer"], found, environ)
    elif found is None and int(environ.get("WORLD_SIZE", "1")) > 1:
        missing = ", ".join(name for name in _TORCHRUNS if name not in environ)
        raise Mistake(
            f"WORLD_SIZE={environ['WORLD_SIZE']} without {missing}",
            "several ranks cannot find each other by that alone",
            "unset WORLD_SIZE, or torchrun --nproc-per-node <ranks> train.py …",
        )
    if not fits:
        return Ranks(per_node=1, num_nodes=1, started_by=found.started_by if found else None)
    if found is not None:
        _refuse_contradiction(config["trainer"], found)
        _refuse_more_than_gpus(config["trainer"], found)
        return found
    per_node = 1 if single else _per_node(config["trainer"])
    num_nodes = int(config["trainer"]["num_nodes"])
    if num_nodes > 1:
        raise Mistake(
            f"trainer.num_nodes={num_nodes}",
            "a run on several machines is started on each of them",
            f"torchrun --nnodes {num_nodes} --nproc-per-node {per_node} train.py …",
        )
    return Ranks(per_node=per_node, num_nodes=1, started_by=None)


def started_by(environ: Mapping[str, str] = os.environ) -> Starter | None:
    """Who started this process as one of the ranks of a run; None: it is no rank."""
    if environ.get(RANK_FILE):
        return "us"
    if all(name in environ for name in _TORCHRUNS):
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


def _existing(environ: Mapping[str, str]) -> Ranks | None:
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
        raise Mistake(
            f"{_started(starter)} {' + '.join(map(str, on_nodes))} ranks",
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


def _refuse_several(
    trainer: Mapping[str, Any], found: Ranks | None, environ: Mapping[str, str]
) -> None:
    """One device is one rank, whoever would start more."""
    world_size = found.world_size if found else int(environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        starter = "srun" if found and found.started_by == "slurm" else "torchrun"
        raise Mistake(
            f"strategy=single with WORLD_SIZE={world_size}",
            "each of these ranks would train the whole run, in the same folder",
            f"strategy=ddp, or python train.py … without {starter}",
        )
    if _asked_for(trainer) * int(trainer["num_nodes"]) > 1:
        raise Mistake(
            f"trainer.devices={trainer['devices']} trainer.num_nodes={trainer['num_nodes']}",
            "strategy=single trains on one device",
            "strategy=ddp, or trainer.devices=1 trainer.num_nodes=1",
        )


def _refuse_contradiction(trainer: Mapping[str, Any], found: Ranks) -> None:
    devices, num_nodes = trainer["devices"], int(trainer["num_nodes"])
    fits = devices in ("auto", -1) or (_asked_for(trainer), num_nodes) == (
        found.per_node,
        found.num_nodes,
    )
    if not fits or num_nodes not in (1, found.num_nodes):
        assert found.started_by is not None
        nodes = "" if found.num_nodes == 1 else f" on {found.num_nodes} nodes"
        raise Mistake(
            f"trainer.devices={devices} trainer.num_nodes={num_nodes}",
            f"{_started(found.started_by)} {found.world_size} ranks{nodes}",
            "trainer.devices=auto trainer.num_nodes=1" if num_nodes > 1 else "trainer.devices=auto",
        )


def _refuse_more_than_gpus(trainer: Mapping[str, Any], found: Ranks) -> None:
    """A GPU is one rank's."""
    gpus = 0 if trainer["accelerator"] == "cpu" or found.started_by == "us" else num_gpus()
    if 0 < gpus < found.per_node:
        assert found.started_by is not None
        has = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        raise Mistake(
            f"{found.per_node} ranks a node",
            f"{_started(found.started_by)} them, and this machine has {has}",
            f"torchrun --nproc-per-node {gpus} train.py …, or trainer.accelerator=cpu",
        )


def _refuse_mode(mode: Mapping[str, Any], found: Ranks) -> NoReturn:
    """What does not train runs once: several ranks would each do all of it."""
    raise Mistake(
        f"mode={mode['_target_'].rpartition('.')[2]} with WORLD_SIZE={found.world_size}",
        "only training is shared among ranks: each of these would do all of it",
        "python train.py … without torchrun or srun",
    )


def _per_node(trainer: Mapping[str, Any]) -> int:
    """Devices asked for on this machine, which must exist where they are GPUs."""
    devices, asked = trainer["devices"], _asked_for(trainer)
    may_be_cpus = not isinstance(devices, list) and devices not in ("auto", -1)
    if trainer["accelerator"] == "cpu" or (may_be_cpus and asked == 1):
        return asked
    gpus = num_gpus()
    if gpus == 0 and trainer["accelerator"] in ("gpu", "cuda"):
        raise Mistake(
            f"trainer.accelerator={trainer['accelerator']}",
            "this machine has no GPU that torch sees",
            "trainer.accelerator=auto",
        )
    if devices in ("auto", -1):
        return max(gpus, 1)
    missing = max(devices) >= gpus if isinstance(devices, list) else asked > gpus > 0
    if missing:
        has = "no GPU" if gpus == 0 else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        counted = " (they count from 0)" if isinstance(devices, list) and gpus else ""
        raise Mistake(
            f"trainer.devices={str(devices).replace(' ', '')}",
            f"this machine has {has}{counted}",
            "trainer.devices=auto",
        )
    return asked


def _asked_for(trainer: Mapping[str, Any]) -> int:
    """Devices a node as typed; 1 where the machine or a launcher says how many."""
    devices = trainer["devices"]
    if isinstance(devices, list):
        return len(devices)
    return devices if isinstance(devices, int) and devices > 0 else 1


def _started(starter: Starter) -> str:
    return {"torchrun": "torchrun started", "slurm": "srun started", "us": "this run has"}[starter]
