"""Plan a run from its config: memory of a rank, seconds of a step, sizes on the disk. Nothing of the run is built."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from recipes.build import build_task
from recipes.config.compose import Config
from recipes.config.instantiate import make
from recipes.config.signature import read_signature
from recipes.config.traits import StrategyTraits, get_traits
from recipes.model.flops import Flops, flops_per_sample
from recipes.numerics.accumulation import Accumulation, divide
from recipes.plan.communication import Communication, of_partitions, of_replicas, of_shards
from recipes.plan.hardware import GIB, Cluster
from recipes.plan.memory import MASTER, Moment, Peak, Zero, find_peak, timeline, with_unsharded_gradients, with_zero
from recipes.plan.roofline import Rates, StepSeconds, time_step
from recipes.plan.step import Batch, Sharding, Step, record_step
from recipes.plan.trace import GRADIENTS, OPTIMIZER, WEIGHTS, Op
from recipes.plan.unroll import block_kinds, record_unrolled
from recipes.precision import Precision
from recipes.strategy.deepspeed.partition import ALIGNMENT, BUCKET_ELEMENTS

# kept free for what the allocator cannot use: blocks of other sizes than those asked for
FRAGMENTATION = 0.05
_HOST_ADAM_BYTES_PER_SECOND = 20e9  # of one rank, weights and state in host memory; depends on the host
_PCIE_BYTES_PER_SECOND = 20e9


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What the strategy of a config does to a step.

    Attributes:
        num_ranks: Of the run.
        sharding: Of FSDP2; None: another.
        zero: Of DeepSpeed; None: another.
        offloads: Whether the optimizer steps in host memory.
    """

    num_ranks: int
    sharding: Sharding | None = None
    zero: Zero | None = None
    offloads: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run needs.

    Attributes:
        cluster: What it is planned for.
        num_ranks: Of the run.
        accumulation: Global batch and micro-batches.
        num_parameters: Of the unsharded model.
        moments: Memory of a rank over one step.
        peak: The fullest of them.
        optimizer_bytes: Optimizer state of the unsharded model.
        host: Bytes in host memory per rank, by what they hold.
        checkpoint_bytes: Of one checkpoint.
        disk_bytes: Of all that are kept.
        flops: Of one sample by the model's own count; None: it has none.
        step: Seconds of the sections; None: no rates are known.
        communication: In a step; None without rates.
        step_seconds: Of an optimizer step; None without rates.
        forward_seconds: Of a micro-batch without gradients.
    """

    cluster: Cluster
    num_ranks: int
    accumulation: Accumulation
    num_parameters: int
    moments: list[Moment]
    peak: Peak
    optimizer_bytes: int
    host: dict[str, int]
    checkpoint_bytes: int
    disk_bytes: int
    flops: Flops | None
    step: StepSeconds | None = None
    communication: Communication | None = None
    step_seconds: float | None = None
    forward_seconds: float | None = None

    @property
    def limit_bytes(self) -> int:
        """Bytes of a device that tensors can use."""
        is_gpu = self.cluster.device.full_name is not None
        return int(self.cluster.memory_bytes * (1 - FRAGMENTATION if is_gpu else 1))

    @property
    def fits(self) -> bool:
        """Whether the fullest moment fits on the device."""
        return self.peak.moment.total <= self.limit_bytes


def make_plan(config: Config, cluster: Cluster, *, rates: Rates | None) -> Plan:
    """Plan a run.

    Args:
        config: Composed and checked.
        cluster: The devices.
        rates: Of one device; None: no times.

    Raises:
        ConfigError: The global batch does not divide over the ranks.
    """
    traits = get_traits(config["strategy"])
    num_ranks = cluster.num_devices if traits.needs_process_group else 1
    accumulation = divide(
        global_batch_size=config["global_batch_size"],
        micro_batch_size=config["micro_batch_size"],
        num_devices=num_ranks,
        accumulate_grad_batches=config["trainer"]["accumulate_grad_batches"],
    )
    precision: Precision = make(config["precision"])
    with torch.device("meta"):
        model: nn.Module = make(config["model"])
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = _find_engine(config, traits, precision, cluster, num_ranks, num_parameters)
    shape = _sample_shape(config)
    step = _describe_step(config, precision, accumulation, engine, shape, on_gpu=cluster.device.full_name is not None)
    kinds = block_kinds(model, every_nth=step.activation_checkpoint.every_nth_block)
    ops = record_unrolled(lambda blocks: record_step(step, blocks=blocks), kinds)
    moments = list(timeline(ops))
    if engine.zero is not None:
        moments = list(
            with_zero(moments, engine.zero, num_parameters=num_parameters, accumulates=step.accumulates)
        )
    elif engine.sharding is not None and step.accumulates and not engine.sharding.syncs_each_micro_batch:
        unsharded = num_parameters * precision.param_dtype.itemsize
        moments = list(with_unsharded_gradients(moments, num_bytes=unsharded))
    state_bytes = _state_bytes(moments[0], engine)
    moments, offloaded = _without_offloaded(moments, engine, is_gpu=step.on_gpu)
    checkpoint_bytes = state_bytes * (num_ranks if engine.zero or engine.sharding else 1)
    if engine.sharding is not None and len(engine.sharding.mesh) > 1:
        checkpoint_bytes //= engine.sharding.mesh[0]
    plan = Plan(
        cluster=cluster,
        num_ranks=num_ranks,
        accumulation=accumulation,
        num_parameters=num_parameters,
        moments=moments,
        peak=find_peak(moments),
        optimizer_bytes=ops[0].allocated.get(OPTIMIZER, 0) * (engine.sharding.mesh[-1] if engine.sharding else 1),
        host=offloaded | _host_copies(config, state_bytes),
        checkpoint_bytes=checkpoint_bytes,
        disk_bytes=checkpoint_bytes * _num_kept(config),
        flops=flops_per_sample(model, shape),
    )
    return plan if rates is None else _with_times(plan, config, ops, engine, rates)


def _find_engine(
    config: Config,
    traits: StrategyTraits,
    precision: Precision,
    cluster: Cluster,
    num_ranks: int,
    num_parameters: int,
) -> Engine:
    node = config["strategy"]
    if traits.state_layout == "fsdp":
        shard_size = node.get("shard_size", num_ranks) or cluster.per_node
        mesh = (num_ranks,) if "shard_size" not in node else (num_ranks // shard_size, shard_size)
        sharding = Sharding(
            mesh=mesh,
            cpu_offload=node["cpu_offload"],
            syncs_each_micro_batch=node["gradient_sync"] == "per_micro_batch",
        )
        return Engine(num_ranks=num_ranks, sharding=sharding, offloads=node["cpu_offload"])
    if traits.state_layout == "zero":
        bucket = max(min(BUCKET_ELEMENTS, num_parameters // 8) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
        zero = Zero(
            stage=node["stage"],
            num_ranks=num_ranks,
            bucket=bucket,
            num_buckets=2 if cluster.device.full_name is not None else 1,
            offloads_optimizer=node["offload_optimizer"] is not None,
            offloads_weights=node["offload_parameters"] is not None,
            is_half=not precision.is_mixed and precision.param_dtype != torch.float32,
        )
        return Engine(num_ranks=num_ranks, zero=zero, offloads=zero.offloads_optimizer)
    return Engine(num_ranks=num_ranks)


def _describe_step(
    config: Config,
    precision: Precision,
    accumulation: Accumulation,
    engine: Engine,
    shape: tuple[int, ...],
    *,
    on_gpu: bool,
) -> Step:
    task = build_task(config | {"metrics": {}, "compile": False}, precision)

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        task.model = model
        objective_sum, _ = task.objective_sum(batch)
        return objective_sum * (1.0 / batch["num_targets"])

    return Step(
        make_model=lambda: make(config["model"]),
        objective=objective,
        make_batch=_batch_maker(task.input_kind, shape, precision),
        make_optimizer=make(config["optimizer"]),
        precision=precision,
        activation_checkpoint=make(config["activation_checkpoint"]),
        micro_batch_size=accumulation.micro_batch_size,
        accumulates=accumulation.num_micro_batches > 1,
        frees_gradients=bool(read_signature(config["strategy"]["_target_"]).constants.get("frees_gradients", True)),
        engine_steps=engine.zero is not None,
        drops_gradients=engine.zero is not None and engine.zero.stage > 1,
        ema_decay=config["ema_decay"],
        sharding=engine.sharding,
        fused=not precision.scales_loss,
        on_gpu=on_gpu,
    )


def _sample_shape(config: Config) -> tuple[int, ...]:
    """Return the shape of one sample: [T] of text, which need not be read; else that of the first sample."""
    if config["seq_len"] is not None:
        return (int(config["seq_len"]),)
    source = make(config["data"])
    source.prepare()
    return tuple(source.train()[0]["inputs"].shape)


def _batch_maker(kind: str, shape: tuple[int, ...], precision: Precision) -> Callable[[int], Batch]:
    def make_batch(size: int) -> Batch:
        if kind == "tokens":
            tokens = torch.zeros(size, *shape, dtype=torch.int64)  # [B, T]
            return {"inputs": tokens, "targets": torch.zeros_like(tokens), "num_targets": size * shape[0]}
        images = torch.zeros(size, *shape, dtype=precision.param_dtype)  # [B, C, H, W]
        return {"inputs": images, "targets": torch.zeros(size, dtype=torch.int64), "num_targets": size}

    return make_batch


def _state_bytes(first: Moment, engine: Engine) -> int:
    """Return the bytes of weights and optimizer state on a rank: what a checkpoint holds, and a snapshot."""
    weights = first.held.get(MASTER, first.held.get(WEIGHTS, 0))
    if engine.zero is not None and engine.zero.is_half:
        weights += first.held.get(WEIGHTS, 0)
    return weights + first.held.get(OPTIMIZER, 0)


def _without_offloaded(moments: list[Moment], engine: Engine, *, is_gpu: bool) -> tuple[list[Moment], dict[str, int]]:
    """Move what is offloaded from the device to the host; a CPU holds both."""
    zero = engine.zero
    names: tuple[str, ...] = ()
    if engine.sharding is not None and engine.offloads:
        names = (WEIGHTS, GRADIENTS, OPTIMIZER)
    elif zero is not None and engine.offloads:
        names = (MASTER, OPTIMIZER, *((GRADIENTS,) if zero.stage > 1 else ()))
        names += (WEIGHTS,) if zero.offloads_weights else ()
    if not names or not is_gpu:
        return moments, {}
    host = {f"offloaded {name}": max(moment.held.get(name, 0) for moment in moments) for name in names}
    kept = [replace(m, held={key: value for key, value in m.held.items() if key not in names}) for m in moments]
    return kept, host


def _host_copies(config: Config, state_bytes: int) -> dict[str, int]:
    """Return what callbacks and checkpoints copy to host memory, per rank."""
    copies: dict[str, int] = {}
    if config["save_every"] is not None or config["save_every_minutes"] is not None:
        copies["checkpoint being written"] = state_bytes
    for node in config["callbacks"].values():
        if isinstance(node, Mapping) and node.get("action") == "rollback" and node.get("snapshot_storage") != "disk":
            copies["snapshots for a rollback"] = state_bytes * int(node["num_snapshots"])
    return copies


def _num_kept(config: Config) -> int:
    """Return the checkpoints that are on the disk at the end of the run, and one that is being written."""
    if config["save_every"] is None and config["save_every_minutes"] is None:
        return 0
    node, steps = config["checkpoint"], config["trainer"]["max_steps"]
    every = node["keep_every"]
    return int(node["keep_last"] + node["keep_best"] + 1 + (steps // every if every else 0))


def _with_times(plan: Plan, config: Config, ops: list[Op], engine: Engine, rates: Rates) -> Plan:
    step = time_step(ops, rates, is_compiled=config["compile"])
    num_micro_batches = plan.accumulation.num_micro_batches
    backward = step.of("backward/").total
    communication = Communication()
    if engine.sharding is not None:
        communication = of_shards(ops, step, plan.cluster, engine.sharding, num_micro_batches=num_micro_batches)
    elif engine.zero is not None:
        communication = of_partitions(
            engine.zero,
            step,
            plan.cluster,
            num_parameters=plan.num_parameters,
            num_micro_batches=num_micro_batches,
            gathers_once=plan.num_parameters <= 1_000_000_000,
        )
    else:
        gradient_bytes = float(ops[0].allocated.get(GRADIENTS, 0))
        communication = of_replicas(
            plan.cluster, num_ranks=plan.num_ranks, gradient_bytes=gradient_bytes, backward_seconds=backward
        )
    seconds = num_micro_batches * (step.of("forward/").total + backward)
    seconds += _optimizer_seconds(plan, step, engine, rates) + communication.exposed_seconds
    return replace(
        plan,
        step=step,
        communication=communication,
        step_seconds=seconds,
        forward_seconds=step.of("forward/").total,
    )


def _optimizer_seconds(plan: Plan, step: StepSeconds, engine: Engine, rates: Rates) -> float:
    share = 4.0 * plan.num_parameters / engine.num_ranks
    if engine.offloads:  # gradients go to the host, weights come back; 7 reads and writes of the state in between
        return 2 * share / _PCIE_BYTES_PER_SECOND + 7 * share / _HOST_ADAM_BYTES_PER_SECOND
    if engine.zero is not None:
        return 9 * share / (rates.bandwidth * rates.memory)
    return step.of("clipping").total + step.of("optimizer").total


def gib(num_bytes: float) -> float:
    """Return bytes as GiB."""
    return num_bytes / GIB
