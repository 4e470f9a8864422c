"""The ranks of a run and their mesh: what is requested, what a launcher started, and what this machine has."""

import math
import os
from collections.abc import Mapping
from typing import Any

from recipes.config.traits import ModeTraits, StrategyTraits
from recipes.errors import ConfigError, type_command
from recipes.mesh import Mesh
from recipes.runtime.world import (
    TORCHRUN_VARIABLES,
    Ranks,
    describe_starter,
    existing_ranks,
    has_own_gpu,
    num_gpus,
    reject_missing_interface,
    reject_other_launcher,
)

# ranks that work on the same samples
MODEL_SIZES = ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")
# supported by FSDP2 only
_BY_FSDP = {
    "tensor_parallel_size": "tensor parallelism",
    "pipeline_parallel_size": "pipeline parallelism",
    "expert_parallel_size": "expert parallelism",
}
# ranks on a machine without a GPU, each a process of its own that imports torch: 3 s of a core
_MIN_CPU_RANKS, _CPU_RANKS_PER_CORE = 16, 4


def find_ranks(
    trainer: Mapping[str, Any],
    mode: ModeTraits,
    strategy: StrategyTraits,
    *,
    runs_elsewhere: bool,
    environ: Mapping[str, str] = os.environ,
) -> Ranks:
    """Return the existing ranks of a run, else the requested ones.

    Args:
        trainer: Its Trainer arguments.
        mode: What it does.
        strategy: Its strategy.
        runs_elsewhere: Whether a launcher starts it on other machines.
        environ: Environment variables of torchrun or SLURM.

    Raises:
        ConfigError: Existing ranks, requested ranks and the machine contradict each other.
    """
    found = existing_ranks(environ)
    if not mode.takes_steps and found is not None and found.world_size > 1:
        raise ConfigError(
            f"mode={mode.name} with WORLD_SIZE={found.world_size}",
            "only training is split over ranks: each of these would repeat all of it",
            "ignore_slurm=true" if found.started_by == "slurm" else type_command("… without torchrun or srun"),
        )
    if mode.trains:
        reject_other_launcher(environ)
    single = not strategy.needs_process_group
    if found is None and int(environ.get("WORLD_SIZE", "1")) > 1:
        _reject_missing_variables(environ)
    if single:
        _reject_several_ranks(trainer, found)
    if not mode.takes_steps:
        return Ranks(per_node=1, num_nodes=1, started_by=found.started_by if found else None)
    if found is not None:
        _reject_contradiction(trainer, found)
        _reject_more_ranks_than_gpus(trainer, found, environ)
        reject_missing_interface(environ)
        return found
    num_nodes = int(trainer["num_nodes"])
    if runs_elsewhere:  # on a login node: the GPUs are elsewhere in the cluster
        per_node = 1 if single else requested_devices(trainer) or 1
        return Ranks(per_node=per_node, num_nodes=num_nodes, started_by=None)
    if not single:
        reject_missing_interface(environ)
    per_node = 1 if single else _per_node(trainer)
    if num_nodes > 1:
        raise ConfigError(
            f"trainer.num_nodes={num_nodes}",
            "a run on several machines must be started on each of them",
            f"torchrun --nnodes {num_nodes} --nproc-per-node {per_node} train.py …",
        )
    return Ranks(per_node=per_node, num_nodes=1, started_by=None)


def _reject_missing_variables(environ: Mapping[str, str]) -> None:
    """Reject a WORLD_SIZE without other variables of torchrun: it is left over, or from a launcher of machines."""
    missing = [name for name in TORCHRUN_VARIABLES if name not in environ]
    left = [name for name in (*TORCHRUN_VARIABLES, "GROUP_WORLD_SIZE") if name in environ]
    fix = f"unset {' '.join(left)}, or torchrun --nproc-per-node <ranks> train.py …"
    if set(missing) == {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}:
        # as a Kubernetes PyTorchJob sets them for each of its pods
        fix = "torchrun --nnodes $WORLD_SIZE --node-rank $RANK --master-addr $MASTER_ADDR --master-port $MASTER_PORT"
        fix += f" --nproc-per-node <GPUs of a node> train.py …, or unset {' '.join(left)} if they are left over"
    raise ConfigError(
        f"WORLD_SIZE={environ['WORLD_SIZE']} without {', '.join(missing)}",
        "torchrun sets all of them for each rank, so it has not started this process",
        fix,
    )


def _reject_several_ranks(trainer: Mapping[str, Any], found: Ranks | None) -> None:
    """Reject several ranks or devices for a strategy that runs on one device."""
    if found is not None and found.world_size > 1:
        fix = "ignore_slurm=true" if found.started_by == "slurm" else type_command("… without torchrun")
        raise ConfigError(
            f"strategy=single with WORLD_SIZE={found.world_size}",
            "each of these ranks would train the same run in the same folder",
            f"strategy=ddp, or {fix}",
        )
    if (requested_devices(trainer) or 1) * int(trainer["num_nodes"]) > 1:
        raise ConfigError(
            f"trainer.devices={trainer['devices']} trainer.num_nodes={trainer['num_nodes']}",
            "strategy=single trains on one device",
            "strategy=ddp, or trainer.devices=1 trainer.num_nodes=1",
        )


def _reject_contradiction(trainer: Mapping[str, Any], found: Ranks) -> None:
    devices, num_nodes = trainer["devices"], int(trainer["num_nodes"])
    fits = devices in ("auto", -1) or (requested_devices(trainer), num_nodes) == (found.per_node, found.num_nodes)
    if not fits or num_nodes not in (1, found.num_nodes):
        assert found.started_by is not None
        nodes = "" if found.num_nodes == 1 else f" on {found.num_nodes} nodes"
        raise ConfigError(
            f"trainer.devices={devices} trainer.num_nodes={num_nodes}",
            f"{describe_starter(found.started_by)} {found.world_size} ranks{nodes}",
            "trainer.devices=auto trainer.num_nodes=1" if num_nodes > 1 else "trainer.devices=auto",
        )


def _reject_more_ranks_than_gpus(trainer: Mapping[str, Any], found: Ranks, environ: Mapping[str, str]) -> None:
    """Reject more ranks per node than GPUs: each rank needs its own."""
    gpus = 0 if trainer["accelerator"] == "cpu" or found.started_by == "spawn" else num_gpus()
    if not 0 < gpus < found.per_node or (gpus == 1 and has_own_gpu(environ)):
        return
    assert found.started_by is not None
    has = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    if found.started_by == "slurm":
        reason, fix = f"each of them sees {has}", f"srun --gpus-per-task=1, or --ntasks-per-node={gpus}"
    else:
        reason, fix = f"this machine has {has}", f"torchrun --nproc-per-node {gpus} train.py …"
    raise ConfigError(
        f"{found.per_node} ranks per node",
        f"{describe_starter(found.started_by)} them, and {reason}",
        f"{fix}, or trainer.accelerator=cpu",
    )


def _per_node(trainer: Mapping[str, Any]) -> int:
    """Return the devices requested on this machine; GPUs must exist."""
    devices, requested = trainer["devices"], requested_devices(trainer) or 1
    may_be_cpus = not isinstance(devices, list) and devices not in ("auto", -1)
    if trainer["accelerator"] == "cpu" or (may_be_cpus and requested == 1):
        _reject_more_ranks_than_cores(trainer, requested)
        return requested
    gpus = num_gpus()
    if gpus == 0 and may_be_cpus:
        _reject_more_ranks_than_cores(trainer, requested)
    if gpus == 0 and trainer["accelerator"] in ("gpu", "cuda"):
        raise ConfigError(
            f"trainer.accelerator={trainer['accelerator']}",
            "this machine has no GPU that torch sees",
            "trainer.accelerator=auto",
        )
    if devices in ("auto", -1):
        return max(gpus, 1)
    missing = max(devices) >= gpus if isinstance(devices, list) else requested > gpus > 0
    if missing:
        has = "no GPU" if gpus == 0 else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        counted = " (they count from 0)" if isinstance(devices, list) and gpus else ""
        raise ConfigError(
            f"trainer.devices={str(devices).replace(' ', '')}",
            f"this machine has {has}{counted}",
            "trainer.devices=auto",
        )
    return requested


def _reject_more_ranks_than_cores(trainer: Mapping[str, Any], requested: int) -> None:
    """Reject more processes than the cores of this machine start in a minute."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = max(_MIN_CPU_RANKS, _CPU_RANKS_PER_CORE * cores)
    if requested > limit:
        has = "1 core" if cores == 1 else f"{cores} cores"
        raise ConfigError(
            f"trainer.devices={trainer['devices']}",
            f"there is no GPU for these ranks, and {has} for that many processes, of which {limit} may be started",
            f"trainer.devices={next(fewer for fewer in range(limit, 0, -1) if requested % fewer == 0)}",
        )


def requested_devices(trainer: Mapping[str, Any]) -> int | None:
    """Return the devices per node as typed; None if the machine or a launcher decides."""
    devices = trainer["devices"]
    if isinstance(devices, list):
        return len(devices)
    return devices if isinstance(devices, int) and devices > 0 else None


def count_data_ranks(config: Mapping[str, Any], world_size: int) -> int:
    """Return the number of data-parallel ranks, even if the sizes do not divide the ranks."""
    model_size: int = math.prod(config[name] or 1 for name in MODEL_SIZES)  # 0 is reported by the check
    return max(1, world_size // model_size)


def make_mesh(config: Mapping[str, Any], strategy: StrategyTraits, ranks: Ranks) -> Mesh:
    """Return the mesh of a config on the given ranks.

    Raises:
        ConfigError: The sizes do not divide the ranks, or the strategy has no such dimension.
    """
    sizes = {name: config[name] for name in MODEL_SIZES}
    for name, what in _BY_FSDP.items():
        size = config[name]
        if size > 1 and strategy.state_layout != "fsdp":
            raise ConfigError(
                f"{name}={size} {strategy.typed}",
                f"{what} needs strategy=fsdp or hsdp",
                f"strategy=fsdp, which shards over the other ranks, or {name}=1",
            )
    model_size = math.prod(sizes.values())
    data_size, rest = divmod(ranks.world_size, model_size)
    if rest or not data_size:
        raise ConfigError(
            " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1),
            f"{_count(ranks.world_size)} not divisible by {model_size}",
            _suggest_sizes(ranks.world_size, sizes),
        )
    tensor, context, pipeline = (sizes[name] for name in MODEL_SIZES)
    replicate, shard = _divide_data(config, strategy, data_size, per_node=max(1, ranks.per_node // (tensor * context)))
    return Mesh(
        expert=_divide_experts(config, shard * context),
        pipeline=pipeline,
        pipeline_schedule=config["pipeline_schedule"],
        replicate=replicate,
        shard=shard,
        context=context,
        tensor=tensor,
        sequence_parallel=config["sequence_parallel"],
    )


def _divide_experts(config: Mapping[str, Any], num_ranks: int) -> int:
    """Return the expert-parallel size within the ranks that share a copy of the model."""
    size: int = config["expert_parallel_size"]
    if num_ranks % size:
        raise ConfigError(
            f"expert_parallel_size={size}",
            f"{_count(num_ranks)} not divisible by {size}",
            f"expert_parallel_size={largest_divisor(num_ranks, most=size)}, or another trainer.devices",
        )
    return size


def _divide_data(
    config: Mapping[str, Any], strategy: StrategyTraits, data_size: int, *, per_node: int
) -> tuple[int, int]:
    """Split `data_size` ranks into model replicas and shards; return both numbers."""
    replicate, shard = (config[f"data_parallel_{name}"] for name in ("replicate", "shard"))
    typed = [f"data_parallel_{n}={s}" for n, s in (("replicate", replicate), ("shard", shard)) if s is not None]
    if strategy.state_layout != "fsdp":
        if (replicate or 1) * (shard or 1) > 1:
            raise ConfigError(
                f"{' '.join(typed)} {strategy.typed}",
                "only strategy=fsdp and hsdp set the number of replicas and of ranks per replica",
                f"strategy=fsdp, or {' '.join(text.partition('=')[0] + '=null' for text in typed)}",
            )
        return (data_size, 1) if strategy.replicates_state else (1, data_size)
    if replicate is None and shard is None:
        shard = min(per_node, data_size) if strategy.shards_within_node else data_size
    has_copies_alone = replicate is not None and shard is None
    shard = max(1, int(shard or data_size // (replicate or 1)))
    replicate = int(replicate or data_size // shard)
    if replicate * shard != data_size and has_copies_alone:
        raise ConfigError(
            typed[0],
            f"{_count(data_size)} not divisible by {replicate}",
            f"data_parallel_replicate={largest_divisor(data_size, most=replicate)}",
        )
    if replicate * shard != data_size:
        raise ConfigError(
            " ".join(typed) or f"strategy={strategy.option}",
            f"{_count(data_size)} not divisible by {shard}"
            if len(typed) < 2
            else f"their product is {replicate * shard}, and {data_size} ranks read samples of their own",
            f"data_parallel_shard={largest_divisor(data_size, most=shard)} data_parallel_replicate=null",
        )
    return replicate, shard


def _suggest_sizes(world_size: int, sizes: Mapping[str, int]) -> str:
    """Return sizes that divide the ranks: the requested ones or the next smaller."""
    left, fits = world_size, []
    for name, size in sizes.items():
        if size > 1:
            fits.append(f"{name}={largest_divisor(left, most=size)}")
            left //= largest_divisor(left, most=size)
    return f"{' '.join(fits)}, or another trainer.devices"


def largest_divisor(number: int, *, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`."""
    return next(size for size in range(min(most, number), 0, -1) if number % size == 0)


def _count(number: int) -> str:
    return "1 rank is" if number == 1 else f"{number} ranks are"
