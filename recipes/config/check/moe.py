"""Check mixture-of-experts settings: number of experts, and what they cannot be combined with."""

import math
from collections.abc import Iterator

from recipes.config.resolved import ResolvedRun
from recipes.config.signature import read_signature
from recipes.errors import ConfigError
from recipes.numerics.expert_shape import ALIGNMENT, find_wrong_experts, find_wrong_latent_heads

_OURS = "recipes.model.moe."  # whose sizes are known; a model of another package checks its own


def check_moe(run: ResolvedRun, *, has_ranks: bool) -> Iterator[ConfigError]:
    """Check a model that routes tokens to experts.

    Args:
        run: Composed run whose nodes match their signatures.
        has_ranks: Whether its number of ranks is valid, else that is reported separately.
    """
    config, model = run.config, run.config["model"]
    if not read_signature(str(model["_target_"])).constants.get("routes_tokens"):
        size = config.get("expert_parallel_size", 1)
        if size != 1 and (run.mode.takes_steps or run.mode.plans_steps):
            yield ConfigError(
                f"expert_parallel_size={size} model._target_={model['_target_']}",
                "it has no experts",
                "expert_parallel_size=1, or model=mixtral_nano or another one with experts",
            )
        return
    if str(model["_target_"]).startswith(_OURS):
        yield from find_wrong_experts(model)
        if "qk_rope_head_dim" in model:
            yield from find_wrong_latent_heads(model)
    yield from _adapter_and_precision(run)
    if run.mode.plans_steps or (run.mode.takes_steps and has_ranks):
        yield from _check_division(run)
    if run.mode.takes_steps:
        yield from _steps(run)


def _adapter_and_precision(run: ResolvedRun) -> Iterator[ConfigError]:
    if run.adapter is not None:
        yield ConfigError(
            f"adapter={run.adapter} with experts",
            "an adapter attaches to linear layers, and experts are not linear layers",
            "adapter=none",
        )
    if run.precision == "fp8-mixed":
        yield ConfigError(
            f"precision={run.precision} with experts",
            "products of experts are not computed in float8",
            "precision=bf16-mixed",
        )


def _check_division(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that experts divide evenly over ranks, and their rows over the ranks with the same experts."""
    size, model = run.config.get("expert_parallel_size", 1), run.config["model"]
    if not isinstance(size, int) or size < 2:
        return
    try:
        shards = run.mesh.expert_shard if run.mode.takes_steps else 1
    except ConfigError:
        return  # reported by the checks of the mesh
    if isinstance(model.get("num_experts"), int) and model["num_experts"] % size:
        yield ConfigError(
            f"expert_parallel_size={size}",
            f"model.num_experts={model['num_experts']} is not divisible by {size} ranks",
            f"expert_parallel_size={math.gcd(size, model['num_experts'])}",
        )
        return
    for name in ("moe_intermediate_size", "hidden_size"):
        rows = model.get(name)
        if isinstance(rows, int) and rows % shards:
            multiple = math.lcm(shards, ALIGNMENT)
            yield ConfigError(
                f"model.{name}={rows} expert_parallel_size={size}",
                f"{shards} ranks share the same experts, and the rows of their matrices are not divisible by {shards}",
                f"model.{name}={-(-rows // multiple) * multiple}",
            )


def _steps(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check a run that takes steps."""
    config = run.config
    size = config.get("tensor_parallel_size", 1)
    if size != 1:
        yield ConfigError(
            f"tensor_parallel_size={size} with experts",
            "experts are not sharded with the rest of a block",
            "tensor_parallel_size=1",
        )
    losses = [name for name in ("router_aux_loss_coef", "router_z_loss") if config["model"].get(name)]
    if losses and config.get("context_parallel_size", 1) != 1:
        typed = " ".join(f"model.{name}={config['model'][name]}" for name in losses)
        yield ConfigError(
            f"context_parallel_size={config['context_parallel_size']} {typed}",
            "the loss terms of a sequence need all of its tokens, and each rank has only a part of them",
            f"{' '.join(f'model.{name}=0' for name in losses)} model.balance_rate=0.001",
        )
    divided = config.get("expert_parallel_size", 1)
    if run.optimizer.updates_matrices:
        yield ConfigError(
            f"optimizer={run.optimizer.name} with experts",
            "it would treat the stacked matrices of all experts as one",
            "optimizer=adamw",
        )
    elif run.optimizer.needs_unsharded and divided != 1:
        yield ConfigError(
            f"optimizer={run.optimizer.name} expert_parallel_size={divided}",
            "it needs unsharded matrices",
            "optimizer=adamw, or expert_parallel_size=1",
        )
