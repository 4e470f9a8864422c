"""Check the sizes of a mixture-of-experts model against each other; pure arithmetic, does not import torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.errors import ConfigError

ALIGNMENT = 8  # numbers in a row of an expert's matrix, 16 bytes in bfloat16: the products of experts need multiples


def find_wrong_experts(model: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield the errors in the number of experts, their groups, and the layers that have none.

    Args:
        model: Arguments of `MoeLlama` by name.
    """
    experts, chosen, layers = model["num_experts"], model["num_experts_per_tok"], model["num_layers"]
    dense = model.get("first_k_dense_replace", 0)
    if chosen > experts:
        yield ConfigError(
            f"model.num_experts_per_tok={chosen}",
            f"there are model.num_experts={experts}",
            f"model.num_experts_per_tok={experts}",
        )
        return
    if dense and model.get("ffn_hidden_size") is None:
        yield ConfigError(
            f"model.first_k_dense_replace={dense}",
            "these layers have a plain MLP, whose width is not set",
            f"model.ffn_hidden_size={4 * model['hidden_size']}",
        )
    if dense >= layers:
        yield ConfigError(
            f"model.first_k_dense_replace={dense}",
            f"there are model.num_layers={layers}, and none would have experts",
            f"model.first_k_dense_replace={max(0, layers - 1)}",
        )
    yield from _find_wrong_groups(
        experts, chosen, groups=model.get("n_group", 1), groups_per_token=model.get("topk_group", 0)
    )
    for name in ("hidden_size", "moe_intermediate_size"):
        size = model[name]
        if size % ALIGNMENT:
            yield ConfigError(
                f"model.{name}={size}",
                f"products of experts need rows of a multiple of 16 bytes, {ALIGNMENT} numbers in bfloat16",
                f"model.{name}={-(-size // ALIGNMENT) * ALIGNMENT}",
            )


def _find_wrong_groups(experts: int, per_token: int, *, groups: int, groups_per_token: int) -> Iterator[ConfigError]:
    chosen = groups_per_token or groups
    size, rest = divmod(experts, groups)
    if rest or (size < 2 and chosen < groups):
        sizes = (number for number in range(1, groups + 1) if experts % number == 0)
        fits = max(number for number in sizes if experts // number >= 2 or number == 1)
        yield ConfigError(
            f"model.n_group={groups}",
            f"model.num_experts={experts} do not divide into groups of two or more",
            f"model.n_group={fits} model.topk_group=0",
        )
        return
    fewest = -(-per_token // size)
    if not fewest <= chosen <= groups:
        yield ConfigError(
            f"model.topk_group={groups_per_token}",
            f"there are model.n_group={groups}"
            if chosen > groups
            else f"model.num_experts_per_tok={per_token} experts do not fit into {chosen} group"
            f"{'s' if chosen > 1 else ''} of {size}",
            f"model.topk_group={fewest}",
        )


def find_wrong_latent_heads(model: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield the errors in the heads of latent attention.

    Args:
        model: Arguments of `DeepSeekV3` by name.
    """
    if model.get("qk_norm"):
        yield ConfigError(
            "model.qk_norm=true",
            "latent attention normalizes the vectors that queries and keys are made of",
            "model.qk_norm=false",
        )
    heads, kv_heads, qk_rope_head_dim = model["num_heads"], model["num_kv_heads"], model["qk_rope_head_dim"]
    if kv_heads != heads:
        yield ConfigError(
            f"model.num_kv_heads={kv_heads}",
            "latent attention makes keys and values for each of model.num_heads",
            f"model.num_kv_heads={heads}",
        )
    if qk_rope_head_dim % 2:
        yield ConfigError(
            f"model.qk_rope_head_dim={qk_rope_head_dim}",
            "rotary positions rotate pairs of channels",
            f"model.qk_rope_head_dim={qk_rope_head_dim + 1}",
        )
        return
    width = model["qk_nope_head_dim"] + qk_rope_head_dim
    if model["v_head_dim"] > width:
        yield ConfigError(
            f"model.v_head_dim={model['v_head_dim']}",
            f"attention has one head size, model.qk_nope_head_dim + model.qk_rope_head_dim = {width}",
            f"model.v_head_dim={width}",
        )
