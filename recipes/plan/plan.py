"""Plan a run from its config without building it: memory per rank, time per step, disk usage."""

from dataclasses import dataclass, replace

from torch import nn

from recipes.config.resolved import ResolvedRun
from recipes.mesh import Mesh
from recipes.model.flops import Flops, flops_per_sample
from recipes.model.weights.adapter import has_adapter
from recipes.numerics.accumulation import Accumulation
from recipes.numerics.grouped_linear import GroupedLinear
from recipes.numerics.nf4 import get_parts
from recipes.plan.hardware import GIB, Cluster
from recipes.plan.measured import OperatorTimer
from recipes.plan.memory import MASTER, Moment, find_peak, timeline, with_unsharded_gradients, with_zero
from recipes.plan.pipeline import Pipeline
from recipes.plan.recorded import Recorded, StrategyEffect, record_config
from recipes.plan.roofline import Rates
from recipes.plan.stages import Stages, divide_layers, stage_moments
from recipes.plan.times import Times, estimate_times, measure_times
from recipes.plan.trace import FROZEN, GRADIENTS, OFFLOADED, OPTIMIZER, WEIGHTS
from recipes.reward.model_folder import MODEL, SETTING, count_bytes
from recipes.runtime.console import LOGGER

# kept free for what the allocator cannot use: blocks of other sizes than those asked for
FRAGMENTATION = 0.05
REWARD_MODELS = "reward model"  # category of memory, of a process beside each rank


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory, time and disk requirements of a run.

    Attributes:
        cluster: Hardware of the plan.
        num_ranks: Ranks of the run.
        mesh: Mesh of the ranks, or of one pipeline stage.
        pipeline: Pipeline stages.
        accumulation: Global batch and micro-batches.
        num_parameters: Parameters of the unsharded model.
        moments: Memory of a rank over one step.
        peak: Moment with the most memory.
        optimizer_bytes: Optimizer state of the unsharded model.
        host: Bytes in host memory per rank, by category.
        checkpoint_bytes: Size of one checkpoint.
        disk_bytes: Size of all retained checkpoints.
        flops: FLOPs of one sample by the model's own count; None if it has none.
        not_recorded: Why the forward pass, and so activations, could not be recorded; None if it was.
        memory_budget: Activation memory budget; None leaves it to torch.
        times: Time breakdown of a step; None without known rates.
        generation: Memory for text generation where weights are sharded; None: nothing is gathered for it.
    """

    cluster: Cluster
    num_ranks: int
    mesh: Mesh
    pipeline: Pipeline
    accumulation: Accumulation
    num_parameters: int
    moments: list[Moment]
    peak: Moment
    optimizer_bytes: int
    host: dict[str, int]
    checkpoint_bytes: int
    disk_bytes: int
    flops: Flops | None
    not_recorded: str | None = None
    memory_budget: float | None = None
    times: Times | None = None
    generation: "GenerationMemory | None" = None

    @property
    def limit_bytes(self) -> int:
        """Bytes of a device that tensors can use."""
        return get_limit(self.cluster)

    @property
    def fits(self) -> bool:
        """Whether the fullest moment fits on the device."""
        return self.peak.total <= self.limit_bytes


@dataclass(frozen=True, kw_only=True)
class GenerationMemory:
    """Memory of a rank whose sharded weights are gathered to generate text.

    Attributes:
        gathered_bytes: Weights of the unsharded model, as they are gathered.
        held_bytes: Weights and optimizer state that the rank holds anyway.
        gathers_once: Whether they are gathered once per call, rather than for each token.
    """

    gathered_bytes: int
    held_bytes: int
    gathers_once: bool


def _plan_generation(resolved: ResolvedRun, recorded: Recorded, plan: "Plan") -> GenerationMemory | None:
    """Return the memory for text generation; None: the run generates none, or does not shard weights."""
    engine, precision = recorded.engine, recorded.step.precision
    is_sharded = engine.sharding is not None or (engine.zero is not None and engine.zero.stage == 3)
    if not is_sharded or "generate" not in resolved.task.supports or engine.pipeline.num_stages > 1:
        return None
    gathered = recorded.num_parameters * precision.param_dtype.itemsize
    if engine.sharding is not None:  # in the dtype that they are multiplied in; DeepSpeed casts them back
        matrices = (part for part in recorded.model.modules() if isinstance(part, nn.Linear | GroupedLinear))
        cast = {parameter for part in matrices for parameter in part.parameters(recurse=False)}
        tables = {part.weight for part in recorded.model.modules() if isinstance(part, nn.Embedding)}
        num_cast = sum(parameter.numel() for parameter in cast - tables)  # a tied head is gathered as the table it is
        gathered -= num_cast * (precision.param_dtype.itemsize - precision.compute_dtype.itemsize)
    gathered //= engine.mesh.tensor
    held = sum(plan.moments[0].held.get(kind, 0) for kind in (WEIGHTS, MASTER, OPTIMIZER))
    setting = resolved.strategy.gather_for_generation
    fits = held + gathered <= plan.limit_bytes
    return GenerationMemory(
        gathered_bytes=gathered,
        held_bytes=held,
        gathers_once=fits if setting == "auto" else setting == "per_call",
    )


def get_limit(cluster: Cluster) -> int:
    """Return the bytes of a device that tensors can use."""
    is_gpu = cluster.device.full_name is not None
    return int(cluster.memory_bytes * (1 - FRAGMENTATION if is_gpu else 1))


def make_plan(resolved: ResolvedRun, cluster: Cluster, *, rates: Rates | OperatorTimer | None) -> Plan:
    """Plan a run.

    Args:
        resolved: Checked run.
        cluster: The devices.
        rates: Of one device, or what times its operators; None: no times.

    Raises:
        ConfigError: The global batch does not divide over the ranks, or there are several and operators are timed.
    """
    recorded = record_config(resolved, cluster, keep_calls=isinstance(rates, OperatorTimer))
    ops, step, engine, accumulation = recorded.ops, recorded.step, recorded.engine, recorded.accumulation
    num_parameters, num_ranks, model = recorded.num_parameters, engine.num_ranks, recorded.model
    stages = _find_stages(recorded)
    beside, on_host = _count_reward_models(resolved, is_gpu=step.on_gpu)
    moments = [replace(each, held=each.held | beside) for each in _find_moments(recorded, stages)]
    trained_share = _find_trained_share(model)
    # a checkpoint of an adapter has no other weights, and nothing else changes in a step
    state_bytes, snapshot_bytes = (
        _state_bytes(moments[0], engine, trained_share=trained_share, keeps_frozen=keeps)
        for keeps in (not has_adapter(model), False)
    )
    moments, offloaded = _without_offloaded(moments, engine, is_gpu=step.on_gpu)
    is_sharded = engine.zero is not None or engine.sharding is not None
    checkpoint_bytes = state_bytes * (num_ranks if is_sharded else 1)
    if engine.sharding is not None:
        checkpoint_bytes //= engine.mesh.replicate
    mesh = engine.mesh
    plan = Plan(
        cluster=cluster,
        num_ranks=num_ranks,
        mesh=mesh,
        pipeline=engine.pipeline,
        accumulation=accumulation,
        num_parameters=num_parameters,
        moments=moments,
        peak=find_peak(moments),
        optimizer_bytes=ops[0].allocated.get(OPTIMIZER, 0)
        * (mesh.world_size // mesh.replicate if engine.sharding else 1),
        host=offloaded
        | on_host
        | _host_copies(resolved, state_bytes, snapshot_bytes, num_sharing=_num_sharing(engine, cluster)),
        checkpoint_bytes=checkpoint_bytes,
        disk_bytes=checkpoint_bytes * resolved.num_checkpoints,
        flops=_count_flops(recorded),
        not_recorded=recorded.reason,
        memory_budget=step.activation_checkpoint.memory_budget,
    )
    plan = replace(plan, generation=_plan_generation(resolved, recorded, plan))
    if rates is None or recorded.reason is not None:
        return plan
    if isinstance(rates, OperatorTimer):
        return replace(plan, times=measure_times(recorded, rates))
    return replace(plan, times=estimate_times(resolved, cluster, recorded, rates, stages=stages))


def _count_flops(recorded: Recorded) -> Flops | None:
    """Return the FLOPs of a sample, of all its rows; None if the model does not count them."""
    of_row = flops_per_sample(
        recorded.model, recorded.shape, frozen=recorded.forward_only, num_images=recorded.images_per_row
    )
    number = recorded.rows_per_sample
    return None if of_row is None else Flops(palm=number * of_row.palm, causal=number * of_row.causal)


def plan_state(resolved: ResolvedRun, cluster: Cluster) -> int | None:
    """Return the bytes of weights, gradients and optimizer state of a rank, without its forward and backward pass.

    Takes seconds for any model.

    Args:
        resolved: Checked run.
        cluster: The devices.

    Returns:
        The bytes; None for a pipeline, whose stages only a whole plan divides.
    """
    recorded = record_config(resolved, cluster, computes=False)
    if recorded.engine.pipeline.num_stages > 1:
        return None
    moments, _ = _without_offloaded(
        _find_moments(recorded, None), recorded.engine, is_gpu=cluster.device.full_name is not None
    )
    kinds = (WEIGHTS, FROZEN, MASTER, GRADIENTS, OPTIMIZER)
    return max(sum(moment.held.get(kind, 0) for kind in kinds) for moment in moments)


def _find_stages(recorded: Recorded) -> Stages | None:
    """Return how a pipeline divides the layers; None: there is no pipeline."""
    engine, step = recorded.engine, recorded.step
    if engine.pipeline.num_stages == 1:
        return None
    mesh = engine.mesh
    divided = mesh.context * (mesh.tensor if mesh.sequence_parallel else 1)
    tokens = recorded.accumulation.micro_batch_size * recorded.shape[0]
    elements = tokens / divided * int(getattr(recorded.model, "hidden_size", 0))
    # hidden states have the dtype of the weights
    boundary_bytes = elements * step.precision.param_dtype.itemsize
    return divide_layers(recorded.ops, recorded.model, engine.pipeline, boundary_bytes=boundary_bytes)


def _find_moments(recorded: Recorded, stages: Stages | None) -> list[Moment]:
    """Return the memory of a rank, with what its engine adds to the recorded operators."""
    ops, engine, step, num_parameters = recorded.ops, recorded.engine, recorded.step, recorded.num_parameters
    moments = list(timeline(ops))
    if engine.zero is not None:
        return list(
            with_zero(
                moments,
                engine.zero,
                num_parameters=num_parameters,
                num_trained=recorded.num_trained,
                num_forward_only=recorded.num_forward_only,
                accumulates=step.accumulates,
            )
        )
    if engine.sharding is None:
        return moments
    precision = step.precision
    experts = sum(part.weight.numel() for part in recorded.model.modules() if isinstance(part, GroupedLinear))
    of_others = experts * (engine.mesh.expert - 1) // engine.mesh.expert
    own_parameters = (num_parameters - of_others) // engine.mesh.tensor  # gathered
    if stages is not None:
        return stage_moments(
            ops,
            moments,
            stages,
            num_micro_batches=recorded.accumulation.num_micro_batches,
            gathered_itemsize=precision.compute_dtype.itemsize,
            gradient_itemsize=engine.sharding.reduce_dtype.itemsize,
            held_share=own_parameters / num_parameters,
        )
    if step.accumulates and not engine.sharding.syncs_each_micro_batch:
        unsharded = own_parameters * recorded.num_trained // num_parameters * precision.param_dtype.itemsize
        return list(with_unsharded_gradients(moments, num_bytes=unsharded))
    return moments


def _find_trained_share(model: nn.Module) -> float:
    """Return the fraction of weight bytes that is trained: what a snapshot holds, and a checkpoint of an adapter."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return 1.0
    of_all, of_trained = (
        sum(part.nbytes for parameter in parameters for part in get_parts(parameter))
        for parameters in (model.parameters(), (p for p in model.parameters() if p.requires_grad))
    )
    return of_trained / of_all


def _state_bytes(first: Moment, engine: StrategyEffect, *, trained_share: float, keeps_frozen: bool) -> int:
    """Return the bytes of weights and optimizer state on a rank: what a checkpoint holds, and a snapshot.

    Args:
        first: Memory before the step.
        engine: Effect of the strategy; ZeRO has a master copy of what is trained.
        trained_share: Fraction of the weights that is trained.
        keeps_frozen: Whether frozen weights are among them.
    """
    share = 1.0 if keeps_frozen else trained_share
    weights = int(first.held.get(WEIGHTS, 0) * share)
    if MASTER in first.held:
        of_masters = int(first.held[MASTER] * share / trained_share)
        weights = of_masters + (weights if engine.zero is not None and engine.zero.is_half else 0)
    return weights + first.held.get(OPTIMIZER, 0)


def _without_offloaded(
    moments: list[Moment], engine: StrategyEffect, *, is_gpu: bool
) -> tuple[list[Moment], dict[str, int]]:
    """Move what is offloaded from the device to the host; a CPU holds both."""
    zero = engine.zero
    names: tuple[str, ...] = ()
    copied = max(moment.held.get(OFFLOADED, 0) for moment in moments)
    if engine.sharding is not None and engine.offloads:
        names = (WEIGHTS, FROZEN, GRADIENTS, OPTIMIZER)
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


def _count_reward_models(resolved: ResolvedRun, *, is_gpu: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Return what reward models hold beside each rank, on its device and in host memory, by category."""
    on_device, on_host = dict[str, int](), dict[str, int]()
    for node in resolved.config["reward"].values():
        if isinstance(node, dict) and node["_target_"] == MODEL:
            held = on_host if is_gpu and node["device"] == "cpu" else on_device
            num_bytes = count_bytes(node["pretrained"])
            if num_bytes is None:
                LOGGER.info(f"{SETTING}={node['pretrained']} is not on this machine: the plan leaves its weights out")
            else:
                held[REWARD_MODELS] = held.get(REWARD_MODELS, 0) + num_bytes
    return on_device, on_host


def _num_sharing(engine: StrategyEffect, cluster: Cluster) -> int:
    """Return the number of ranks of a node that share one snapshot because they hold the same state."""
    return min(engine.num_ranks, cluster.per_node) if engine.sharding is None and engine.zero is None else 1


def _host_copies(resolved: ResolvedRun, state_bytes: int, snapshot_bytes: int, *, num_sharing: int) -> dict[str, int]:
    """Return what callbacks and checkpoints copy to host memory, per rank."""
    copies: dict[str, int] = {}
    if resolved.saves:
        copies["checkpoint being written"] = state_bytes
    if resolved.num_host_snapshots:
        copies["snapshots for a rollback"] = snapshot_bytes * resolved.num_host_snapshots // num_sharing
    return copies


def gib(num_bytes: float) -> float:
    """Return bytes as GiB."""
    return num_bytes / GIB


def size_unit(num_bytes: float) -> tuple[str, int]:
    """Return the unit in which a size is shown, and its bytes: two decimals of a GiB say nothing of a small model."""
    return ("GiB", GIB) if num_bytes >= GIB else ("MiB", 2**20)
