"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and routed and shared experts.

Multi-token prediction is not implemented, although the published weights have a layer for it.
"""

from typing import Annotated, Any

from torch import nn
from typing_extensions import override

from recipes.model.latent_attention import LatentAttention
from recipes.model.moe.llama import MoeLlama
from recipes.numerics.expert_shape import find_wrong_latent_heads


class DeepSeekV3(MoeLlama):
    """A `MoeLlama` with latent attention; weights are interchangeable with `DeepseekV3ForCausalLM`.

    Args:
        num_heads: H, number of query, key and value heads.
        num_kv_heads: Must equal `num_heads`.
        qk_nope_head_dim: Channels per query and key head without RoPE.
        qk_rope_head_dim: Channels with RoPE; those of the keys are shared by all heads.
        v_head_dim: Channels per value head.
        kv_lora_rank: Size of the latent vector of keys and values.
        q_lora_rank: Size of the latent vector of queries; None: queries are projected from the hidden state.
        qk_norm: Must be False: latent vectors are normalized instead.
        **settings: As for `MoeLlama`.

    Raises:
        ConfigError: As for `MoeLlama`; also if head sizes are inconsistent or `qk_norm` is set.
    """

    def __init__(
        self,
        *,
        num_heads: Annotated[int, ">= 1"],
        num_kv_heads: Annotated[int, ">= 1"],
        qk_nope_head_dim: Annotated[int, ">= 1"],
        qk_rope_head_dim: Annotated[int, ">= 2"],
        v_head_dim: Annotated[int, ">= 1"],
        kv_lora_rank: Annotated[int, ">= 1"],
        q_lora_rank: Annotated[int, ">= 1"] | None = None,
        qk_norm: bool = False,
        **settings: Any,
    ) -> None:
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.kv_lora_rank = kv_lora_rank
        self.q_lora_rank = q_lora_rank
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "qk_norm": qk_norm}
        heads |= {"qk_nope_head_dim": qk_nope_head_dim, "qk_rope_head_dim": qk_rope_head_dim, "v_head_dim": v_head_dim}
        for mistake in find_wrong_latent_heads(heads):
            raise mistake
        super().__init__(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=qk_nope_head_dim, **settings)

    @override
    def _build_attention(self) -> nn.Module:
        return LatentAttention(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )

    @property
    @override
    def rotated_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    @override
    def attention_width(self) -> int:
        return self.num_heads * (self.head_dim + self.qk_rope_head_dim + self.v_head_dim) // 2
