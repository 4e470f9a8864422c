"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and routed and shared experts.

Multi-token prediction is not implemented, although the published weights have a layer for it.
"""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from recipes.model.decoder import attend
from recipes.model.documents import Documents
from recipes.model.kv_cache import LayerCache
from recipes.model.moe.llama import MoeLlama
from recipes.model.rope import Rotation, rotate
from recipes.numerics.expert_shape import find_wrong_latent_heads
from recipes.numerics.linear import Linear
from recipes.numerics.rms_norm import RMSNorm
from recipes.parallel.context import ContextRanks


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


# Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434).
#
# Shapes: B sequences, T tokens, W hidden size, H heads, D and R channels per head without and with RoPE, V channels per
# value head, Lq and Lk latent sizes of queries, and of keys and values.

_LATENT_EPS = 1e-6  # epsilon of the latent norms: fixed in transformers, independent of `rms_norm_eps`


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values are projected from one latent vector per token.

    RoPE applies to separate channels; those of the keys are shared by all heads. Neighboring channels form the rotated
    pairs, as in the published weights.

    Args:
        hidden_size: W.
        num_heads: H.
        q_lora_rank: Lq; None: queries are projected from the hidden state.
        kv_lora_rank: Lk.
        qk_nope_head_dim: D.
        qk_rope_head_dim: R.
        v_head_dim: V, at most D + R.

    Attributes:
        context: Context-parallel ranks; None: the sequence is not sharded.
    """

    context: ContextRanks | None = None

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.query_down = None if q_lora_rank is None else Linear(hidden_size, q_lora_rank, bias=False)
        self.query_norm = None if q_lora_rank is None else RMSNorm(q_lora_rank, eps=_LATENT_EPS)
        width = hidden_size if q_lora_rank is None else q_lora_rank
        self.query = Linear(width, num_heads * (qk_nope_head_dim + qk_rope_head_dim), bias=False)
        self.key_value_down = Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias=False)
        self.key_value_norm = RMSNorm(kv_lora_rank, eps=_LATENT_EPS)
        self.key_value = Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.out = Linear(num_heads * v_head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, cache: LayerCache | None, documents: Documents | None) -> Tensor:
        """[B, T, W] -> [B, T, W]"""
        batch, num_tokens, _ = x.shape
        latent = x if self.query_down is None or self.query_norm is None else self.query_norm(self.query_down(x))
        queries = self.query(latent).view(batch, num_tokens, self.num_heads, -1)  # [B, T, H, D + R]
        down = self.key_value_down(x)  # [B, T, Lk + R]
        heads = self.key_value(self.key_value_norm(down[..., : self.kv_lora_rank]))
        heads = heads.view(batch, num_tokens, self.num_heads, -1)  # [B, T, H, D + V]
        shared = down[..., self.kv_lora_rank :].unsqueeze(2)  # [B, T, 1, R]
        with_position = torch.cat((queries[..., self.qk_nope_head_dim :], shared), dim=2)  # [B, T, H + 1, R]
        rotated = rotate(with_position, rotation, pairs_neighbors=True)
        queries = torch.cat((queries[..., : self.qk_nope_head_dim], rotated[:, :, :-1]), dim=-1)  # [B, T, H, D + R]
        shared = rotated[:, :, -1:].expand(-1, -1, self.num_heads, -1)
        keys = torch.cat((heads[..., : self.qk_nope_head_dim], shared), dim=-1)  # [B, T, H, D + R]
        # torch's flash kernels (2.13) need equal head sizes; the math fallback would store all T x T scores
        values = F.pad(
            heads[..., self.qk_nope_head_dim :], (0, self.qk_nope_head_dim + self.qk_rope_head_dim - self.v_head_dim)
        )
        mixed = attend(
            queries.transpose(1, 2),  # [B, H, T, D + R]
            keys.transpose(1, 2),
            values.transpose(1, 2),
            dropout=0.0,
            cache=cache,
            documents=documents,
            context=self.context,
        )  # [B, H, T, D + R]
        mixed = mixed[..., : self.v_head_dim].transpose(1, 2)  # [B, T, H, V]
        out: Tensor = self.out(mixed.reshape(batch, num_tokens, -1))
        return out
