"""Derive a step to record, and the strategy's effect on it, from a config."""

import math
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from recipes.build import build_task
from recipes.config.compose import Config
from recipes.config.instantiate import make, make_model
from recipes.config.mesh import make_mesh
from recipes.config.signature import read_signature
from recipes.config.traits import get_traits
from recipes.errors import ConfigError
from recipes.mesh import Mesh
from recipes.numerics.accumulation import Accumulation
from recipes.plan.hardware import Cluster
from recipes.plan.memory import Zero
from recipes.plan.pipeline import Pipeline, read_pipeline
from recipes.plan.step import Batch, Sharding, Step
from recipes.precision import Precision
from recipes.runtime.world import Ranks
from recipes.strategy.deepspeed.partition import ALIGNMENT, BUCKET_ELEMENTS, list_cast_weights


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Effect of a config's strategy on a step.

    Attributes:
        mesh: Mesh of the run, or of one pipeline stage.
        pipeline: Pipeline stages.
        sharding: FSDP2 sharding; None under other strategies.
        zero: DeepSpeed partitioning; None under other strategies.
        offloads: Whether the optimizer steps in host memory.
    """

    mesh: Mesh
    pipeline: Pipeline = field(default_factory=Pipeline)
    sharding: Sharding | None = None
    zero: Zero | None = None
    offloads: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the run."""
        return self.mesh.world_size * self.pipeline.num_stages


def find_engine(config: Config, precision: Precision, cluster: Cluster, *, model: nn.Module) -> Engine:
    """Return the effect of a config's strategy on a cluster.

    Args:
        config: Composed and checked config.
        precision: Precision of the run.
        cluster: The devices.
        model: Unsharded model, on any device.

    Raises:
        ConfigError: The sizes of the mesh do not divide the ranks.
    """
    node = config["strategy"]
    traits = get_traits(node)
    pipeline, mesh = divide_ranks(config, cluster)
    if traits.state_layout == "fsdp":
        sharding = Sharding(
            cpu_offload=node["cpu_offload"],
            syncs_each_micro_batch=node["gradient_sync"] == "per_micro_batch" and pipeline.num_stages == 1,
            reshard_after_forward=node["reshard_after_forward"],
            reduce_dtype=torch.bfloat16 if node["reduce_dtype"] == "bfloat16" else precision.reduce_dtype,
        )
        return Engine(mesh=mesh, pipeline=pipeline, sharding=sharding, offloads=node["cpu_offload"])
    if traits.state_layout == "zero":
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        cast = list_cast_weights(getattr(model, "blocks", ())) if node["stage"] == 3 and precision.is_mixed else ()
        bucket = max(min(BUCKET_ELEMENTS, num_parameters // 8) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
        zero = Zero(
            stage=node["stage"],
            num_ranks=mesh.world_size,
            bucket=bucket,
            num_buckets=2 if cluster.device.full_name is not None else 1,
            offloads_optimizer=node["offload_optimizer"] is not None,
            offloads_weights=node["offload_parameters"] is not None,
            is_half=not precision.is_mixed and precision.param_dtype != torch.float32,
            num_cast=sum(weight.numel() for weight in cast),
        )
        return Engine(mesh=mesh, zero=zero, offloads=zero.offloads_optimizer)
    return Engine(mesh=mesh)


def divide_ranks(config: Config, cluster: Cluster) -> tuple[Pipeline, Mesh]:
    """Return the pipeline of a config, and the mesh of one stage.

    Raises:
        ConfigError: The sizes do not divide the ranks.
    """
    pipeline = read_pipeline(config)
    traits = get_traits(config["strategy"])
    world_size = cluster.num_devices if traits.needs_process_group else 1
    stages = pipeline.num_stages
    if stages > 1 and traits.state_layout != "fsdp":
        raise ConfigError(
            f"pipeline_parallel_size={stages} {traits.typed}",
            "a plan splits layers into stages under strategy=fsdp and hsdp only",
            "strategy=fsdp, or pipeline_parallel_size=1",
        )
    if world_size % stages:
        raise ConfigError(
            f"pipeline_parallel_size={stages}",
            f"{world_size} ranks are not divisible by {stages} stages",
            f"pipeline_parallel_size={math.gcd(world_size, stages)}",
        )
    per_node = math.gcd(cluster.per_node, world_size // stages)  # stages are the outermost dimension
    ranks = Ranks(per_node=per_node, num_nodes=world_size // stages // per_node, started_by=None)
    return pipeline, make_mesh(config | {"pipeline_parallel_size": 1}, ranks)


def describe_step(
    config: Config,
    precision: Precision,
    accumulation: Accumulation,
    engine: Engine,
    shape: tuple[int, ...],
    *,
    on_gpu: bool,
) -> Step:
    """Return everything that a step of a config depends on.

    Args:
        config: Composed and checked config.
        precision: Precision of the run.
        accumulation: Global batch and micro-batches.
        engine: Effect of its strategy.
        shape: Shape of one sample.
        on_gpu: Whether to record GPU operators.
    """
    task = build_task(config | {"metrics": {}, "compile": False}, precision)
    task.scales_loss = False  # the loss scale is a scalar of the run's strategy

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        vars(task).pop("_head_loss", None)  # it caches the ranks of the first model
        task.model = model
        objective_sum, _ = task.objective_sum(batch)
        loss: Tensor = objective_sum * (1.0 / batch["num_targets"])
        return loss

    return Step(
        make_model=lambda: make_model(config),
        objective=objective,
        make_batch=partial(_make_batch, task.input_kind, accumulation.micro_batch_size, shape, precision),
        make_optimizer=make(config["optimizer"]),
        precision=precision,
        activation_checkpoint=make(config["activation_checkpoint"]),
        accumulates=accumulation.num_micro_batches > 1,
        frees_gradients=bool(read_signature(config["strategy"]["_target_"]).constants.get("frees_gradients", True)),
        engine_steps=engine.zero is not None,
        drops_gradients=engine.zero is not None and engine.zero.stage > 1,
        ema_decay=config["ema_decay"],
        mesh=engine.mesh,
        sharding=engine.sharding,
        num_replicas=engine.mesh.world_size if engine.sharding is None and engine.zero is None else 1,
        on_gpu=on_gpu,
    )


def find_sample_shape(config: Config) -> tuple[int, ...]:
    """Return the shape of one sample: [T] for text, without reading data; else that of the first sample."""
    if config["seq_len"] is not None:
        return (int(config["seq_len"]),)
    source = make(config["data"])
    source.prepare()
    return tuple(source.train()[0]["inputs"].shape)


def _make_batch(kind: str, size: int, shape: tuple[int, ...], precision: Precision) -> Batch:
    if kind == "tokens":
        tokens = torch.zeros(size, *shape, dtype=torch.int64)  # [B, T]
        return {"inputs": tokens, "targets": torch.zeros_like(tokens), "num_targets": size * shape[0]}
    images = torch.zeros(size, *shape, dtype=precision.param_dtype)  # [B, C, H, W]
    return {"inputs": images, "targets": torch.zeros(size, dtype=torch.int64), "num_targets": size}
