"""Check mixture-of-experts settings: number of experts, and what they cannot be combined with."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.mesh import make_mesh
from recipes.config.ranks import get_ranks
from recipes.config.signature import read_signature
from recipes.config.traits import plans_steps, takes_steps
from recipes.errors import ConfigError
from recipes.numerics.expert_shape import ALIGNMENT, find_wrong_experts, find_wrong_latent_heads

# optimizers that treat any tensor with two or more axes as one matrix
_OF_MATRICES = ("adafactor", "muon")
_OURS = "recipes.model.moe."  # whose sizes are known; a model of another package checks its own


def check_moe(config: Mapping[str, Any], world_size: int | None) -> Iterator[ConfigError]:
    """Check a model that routes tokens to experts.

    Args:
        config: Composed config whose nodes match their signatures.
        world_size: Number of ranks; None if it is invalid, which is reported separately.
    """
    model = config["model"]
    if not read_signature(str(model["_target_"])).constants.get("routes_tokens"):
        size = config.get("expert_parallel_size", 1)
        if size != 1 and (takes_steps(config) or plans_steps(config)):
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
    yield from _adapter_and_precision(config)
    if plans_steps(config) or (takes_steps(config) and world_size is not None):
        yield from _check_division(config)
    if takes_steps(config):
        yield from _steps(config)


def _adapter_and_precision(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    adapter = str((config.get("adapter") or {}).get("_target_", "recipes.adapter.NoAdapter"))
    if not adapter.endswith(".NoAdapter"):
        yield ConfigError(
            f"adapter={adapter.split('.')[-2]} with experts",
            "an adapter attaches to linear layers, and experts are not linear layers",
            "adapter=none",
        )
    precision = str(config["precision"].get("name", ""))
    if precision.startswith("fp8"):
        yield ConfigError(
            f"precision={precision} with experts",
            "products of experts are not computed in float8",
            "precision=bf16-mixed",
        )


def _check_division(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check that experts divide evenly over ranks, and their rows over the ranks with the same experts."""
    size, model = config.get("expert_parallel_size", 1), config["model"]
    if not isinstance(size, int) or size < 2:
        return
    try:
        shards = make_mesh(config, get_ranks(config)).expert_shard if takes_steps(config) else 1
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


def _steps(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check a run that takes steps."""
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
    optimizer = str(config["optimizer"]["_target_"]).split(".")
    if "recipes" in optimizer and optimizer[-2] in _OF_MATRICES:
        yield ConfigError(
            f"optimizer={optimizer[-2]} with experts",
            "it would treat the stacked matrices of all experts as one",
            "optimizer=adamw",
        )
    divided = config.get("expert_parallel_size", 1)
    if "recipes" in optimizer and optimizer[-2] == "adamw_8bit" and divided != 1:
        yield ConfigError(
            f"optimizer=adamw_8bit expert_parallel_size={divided}",
            "it needs unsharded matrices",
            "optimizer=adamw, or expert_parallel_size=1",
        )
