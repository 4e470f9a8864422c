"""Plan a run from its config: memory of a rank, seconds of a step, sizes on the disk. Nothing of the run is built."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from recipes.config.compose import Config
from recipes.config.instantiate import make, make_model
from recipes.config.traits import get_compile_mode
from recipes.errors import ConfigError
from recipes.model.flops import Flops, flops_per_sample
from recipes.model.weights.adapter import has_adapter
from recipes.numerics.accumulation import Accumulation, divide
from recipes.numerics.nf4 import get_parts
from recipes.plan.activations import PCIE_BYTES_PER_SECOND, Transfer, keep_budget, time_transfers
from recipes.plan.communication import Communication, of_partitions, of_replicas, of_shards
from recipes.plan.config_step import Engine, describe_step, find_engine, find_sample_shape
from recipes.plan.hardware import GIB, Cluster
from recipes.plan.measured import OperatorTimer, calibrate, time_operators
from recipes.plan.memory import MASTER, Moment, Peak, find_peak, timeline, with_unsharded_gradients, with_zero
from recipes.plan.roofline import Rates, StepSeconds, time_step
from recipes.plan.step import Step, record_step
from recipes.plan.trace import GRADIENTS, OFFLOADED, OPTIMIZER, WEIGHTS, Op
from recipes.plan.unroll import block_kinds, record_unrolled
from recipes.precision import Precision

# kept free for what the allocator cannot use: blocks of other sizes than those asked for
FRAGMENTATION = 0.05
_HOST_ADAM_BYTES_PER_SECOND = 20e9  # of one rank, weights and state in host memory; depends on the host


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
        not_recorded: Why the forward pass could not be recorded, so that activations are missing; None: it was.
        step: Seconds of the sections; None: no rates are known.
        communication: In a step; None without rates.
        transfer: Activations to host memory and back, in a micro-batch; None: there are none, or no rates.
        memory_budget: Of the activations; None: torch's own choice.
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
    not_recorded: str | None = None
    step: StepSeconds | None = None
    communication: Communication | None = None
    transfer: Transfer | None = None
    memory_budget: float | None = None
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


def make_plan(config: Config, cluster: Cluster, *, rates: Rates | OperatorTimer | None) -> Plan:
    """Plan a run.

    Args:
        config: Composed and checked.
        cluster: The devices.
        rates: Of one device, or what times its operators; None: no times.

    Raises:
        ConfigError: The global batch does not divide over the ranks, or there are several and operators are timed.
    """
    precision: Precision = make(config["precision"])
    with torch.device("meta"):
        model: nn.Module = make_model(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = find_engine(config, precision, cluster, model=model)
    num_ranks = engine.num_ranks
    accumulation = divide(
        global_batch_size=config["global_batch_size"],
        micro_batch_size=config["micro_batch_size"],
        num_devices=num_ranks,
        accumulate_grad_batches=config["trainer"]["accumulate_grad_batches"],
    )
    shape = find_sample_shape(config)
    step = describe_step(config, precision, accumulation, engine, shape, on_gpu=cluster.device.full_name is not None)
    kinds = block_kinds(model, recomputes=step.activation_checkpoint.recomputes)
    ops, reason = _record(step, kinds, keep_calls=isinstance(rates, OperatorTimer))
    moments = list(timeline(ops))
    if engine.zero is not None:
        moments = list(with_zero(moments, engine.zero, num_parameters=num_parameters, accumulates=step.accumulates))
    elif engine.sharding is not None and step.accumulates and not engine.sharding.syncs_each_micro_batch:
        unsharded = num_parameters * precision.param_dtype.itemsize
        moments = list(with_unsharded_gradients(moments, num_bytes=unsharded))
    state_bytes = _state_bytes(moments[0], engine, saved_share=_saved_share(model))
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
        host=offloaded | _host_copies(config, state_bytes, num_sharing=_num_sharing(engine, cluster)),
        checkpoint_bytes=checkpoint_bytes,
        disk_bytes=checkpoint_bytes * _num_kept(config),
        flops=flops_per_sample(model, shape),
        not_recorded=reason,
        memory_budget=step.activation_checkpoint.memory_budget,
    )
    if rates is None or reason is not None:
        return plan
    if isinstance(rates, OperatorTimer):
        return _with_measured_times(plan, ops, step, kinds, rates)
    return _with_times(plan, config, ops, engine, rates)


def _record(step: Step, kinds: Sequence[object], *, keep_calls: bool) -> tuple[list[Op], str | None]:
    """Return the operators of a step and why those of the forward pass are missing; None: they are there."""
    try:
        ops = record_unrolled(lambda blocks: record_step(step, blocks=blocks, keep_calls=keep_calls), kinds)
    except (RuntimeError, NotImplementedError) as error:  # what a fake tensor raises where a value is read
        reason = " ".join(str(error).split()) or type(error).__name__
        return record_step(step, computes=False), reason
    budget = step.activation_checkpoint.memory_budget
    return ops if budget is None else keep_budget(ops, budget), None


def _saved_share(model: nn.Module) -> float:
    """Return the share of the bytes of all weights that checkpoints hold: of an adapter, it alone."""
    if not has_adapter(model):
        return 1.0
    of_all, of_trained = (
        sum(part.nbytes for parameter in parameters for part in get_parts(parameter))
        for parameters in (model.parameters(), (p for p in model.parameters() if p.requires_grad))
    )
    return of_trained / of_all


def _state_bytes(first: Moment, engine: Engine, *, saved_share: float) -> int:
    """Return the bytes of weights and optimizer state on a rank: what a checkpoint holds, and a snapshot."""
    weights = int(first.held.get(MASTER, first.held.get(WEIGHTS, 0)) * saved_share)
    if engine.zero is not None and engine.zero.is_half:
        weights += int(first.held.get(WEIGHTS, 0) * saved_share)
    return weights + first.held.get(OPTIMIZER, 0)


def _without_offloaded(moments: list[Moment], engine: Engine, *, is_gpu: bool) -> tuple[list[Moment], dict[str, int]]:
    """Move what is offloaded from the device to the host; a CPU holds both."""
    zero = engine.zero
    names: tuple[str, ...] = ()
    copied = max(moment.held.get(OFFLOADED, 0) for moment in moments)
    if engine.sharding is not None and engine.offloads:
        names = (WEIGHTS, GRADIENTS, OPTIMIZER)
    elif zero is not None and engine.offloads:
        names = (MASTER, OPTIMIZER, *((GRADIENTS,) if zero.stage > 1 else ()))
        names += (WEIGHTS,) if zero.offloads_weights else ()
    if not (names or copied) or not is_gpu:
        return moments, {}
    host = {f"offloaded {name}": max(moment.held.get(name, 0) for moment in moments) for name in names}
    if copied:
        names += (OFFLOADED,)
        host[OFFLOADED] = copied
    kept = [replace(m, held={key: value for key, value in m.held.items() if key not in names}) for m in moments]
    return kept, host


def _num_sharing(engine: Engine, cluster: Cluster) -> int:
    """Return how many ranks of a node keep one snapshot together: those that hold the same state."""
    return min(engine.num_ranks, cluster.per_node) if engine.sharding is None and engine.zero is None else 1


def _host_copies(config: Config, state_bytes: int, *, num_sharing: int) -> dict[str, int]:
    """Return what callbacks and checkpoints copy to host memory, per rank."""
    copies: dict[str, int] = {}
    if config["save_every"] is not None or config["save_every_minutes"] is not None:
        copies["checkpoint being written"] = state_bytes
    for node in config["callbacks"].values():
        if isinstance(node, Mapping) and node.get("action") == "rollback" and node.get("snapshot_storage") != "disk":
            copies["snapshots for a rollback"] = state_bytes * int(node["num_snapshots"]) // num_sharing
    return copies


def _num_kept(config: Config) -> int:
    """Return the checkpoints that are on the disk at the end of the run, and one that is being written."""
    if config["save_every"] is None and config["save_every_minutes"] is None:
        return 0
    node, steps = config["checkpoint"], config["trainer"]["max_steps"]
    every = node["keep_every"]
    return int(node["keep_last"] + node["keep_best"] + 1 + (steps // every if every else 0))


def _with_measured_times(plan: Plan, ops: list[Op], step: Step, kinds: Sequence[object], timer: OperatorTimer) -> Plan:
    if plan.num_ranks > 1:
        raise ConfigError(
            f"plan.hardware=measured with {plan.num_ranks} ranks",
            "operators are timed on one device, and what ranks send each other is not",
            "strategy=single trainer.devices=1, or plan.hardware=<a device of the table>",
        )
    times = time_operators(ops, timer, factor=calibrate(step, kinds, timer))
    forward, backward = times.of("forward/").total, times.of("backward/").total
    transfer = time_transfers(ops, times) if step.on_gpu else None  # on a CPU the copies were timed
    exposed = transfer.exposed_seconds if transfer is not None else 0.0
    seconds = plan.accumulation.num_micro_batches * (forward + backward + exposed)
    seconds += times.of("clipping").total + times.of("optimizer").total
    return replace(
        plan,
        step=times,
        communication=Communication(),
        transfer=transfer,
        step_seconds=seconds,
        forward_seconds=forward,
    )


def _with_times(plan: Plan, config: Config, ops: list[Op], engine: Engine, rates: Rates) -> Plan:
    on_gpu = plan.cluster.device.full_name is not None
    step = time_step(ops, rates, is_compiled=get_compile_mode(config, on_gpu=on_gpu) is not None)
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
            plan.cluster, num_ranks=plan.num_ranks, gradient_bytes=gradient_bytes, backward_seconds=backward, ops=ops
        )
    transfer = time_transfers(ops, step)
    exposed = transfer.exposed_seconds if transfer is not None else 0.0
    seconds = num_micro_batches * (step.of("forward/").total + backward + exposed)
    seconds += _optimizer_seconds(plan, step, engine, rates) + communication.exposed_seconds
    return replace(
        plan,
        step=step,
        communication=communication,
        transfer=transfer,
        step_seconds=seconds,
        forward_seconds=step.of("forward/").total,
    )


def _optimizer_seconds(plan: Plan, step: StepSeconds, engine: Engine, rates: Rates) -> float:
    share = 4.0 * plan.num_parameters / engine.num_ranks
    if engine.offloads:  # gradients go to the host, weights come back; 7 reads and writes of the state in between
        return 2 * share / PCIE_BYTES_PER_SECOND + 7 * share / _HOST_ADAM_BYTES_PER_SECOND
    if engine.zero is not None:
        return 9 * share / (rates.bandwidth * rates.memory)
    return step.of("clipping").total + step.of("optimizer").total


def gib(num_bytes: float) -> float:
    """Return bytes as GiB."""
    return num_bytes / GIB
