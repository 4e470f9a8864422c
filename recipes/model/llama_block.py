"""Llama block: grouped-query attention and SwiGLU, each preceded by an RMSNorm.

Shapes: B sequences, T tokens, W hidden_size, H query heads, G key-value heads, Q head size.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.model.decoder import attend
from recipes.model.documents import Documents
from recipes.model.kv_cache import LayerCache
from recipes.model.rope import Rotation, rotate
from recipes.numerics.linear import Linear
from recipes.numerics.rms_norm import RMSNorm
from recipes.parallel.context import ContextRanks
from recipes.parallel.tensor import ParallelStyle


class Attention(nn.Module):
    """Grouped-query causal self-attention; one matrix projects to queries, keys and values.

    Args:
        hidden_size: W.
        num_heads: H, number of query heads.
        num_kv_heads: G, number of key-value heads; divides H.
        head_dim: Q.
        rms_eps: Epsilon of the `qk_norm` RMSNorm.
        qk_norm: Whether to apply RMSNorm to each query and key head before RoPE.

    Attributes:
        context: Context-parallel ranks; None: the sequence is not sharded.
    """

    tensor_parallel: ClassVar[dict[str, ParallelStyle]] = {
        "qkv": "columns",
        "out": "rows",
        "query_norm": "head_norm",
        "key_norm": "head_norm",
    }
    context: ContextRanks | None = None

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_eps: float,
        qk_norm: bool,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.qkv = Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=False)
        self.out = Linear(num_heads * head_dim, hidden_size, bias=False)
        self.query_norm = RMSNorm(head_dim, eps=rms_eps) if qk_norm else None
        self.key_norm = RMSNorm(head_dim, eps=rms_eps) if qk_norm else None

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """Return the row counts of queries, keys and values, which optimizers such as Muon must treat separately."""
        keys = self.num_kv_heads * self.head_dim
        return {"qkv.weight": (self.num_heads * self.head_dim, keys, keys)}

    def split_heads(self, num_ranks: int) -> None:
        """Set the number of heads to that of one of `num_ranks` tensor-parallel ranks, which shard `qkv` and `out`."""
        self.num_heads //= num_ranks
        self.num_kv_heads //= num_ranks

    def forward(self, x: Tensor, rotation: Rotation, cache: LayerCache | None, documents: Documents | None) -> Tensor:
        """[B, T, W] -> [B, T, W]"""
        batch, num_tokens, _ = x.shape
        heads = self.qkv(x).view(batch, num_tokens, -1, self.head_dim)  # [B, T, H + 2 G, Q]
        num_rotated = self.num_heads + self.num_kv_heads  # values are not rotated
        unrotated, values = heads[:, :, :num_rotated], heads[:, :, num_rotated:]
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = unrotated[:, :, : self.num_heads], unrotated[:, :, self.num_heads :]
            unrotated = torch.cat((self.query_norm(queries), self.key_norm(keys)), dim=2)
        rotated = rotate(unrotated, rotation)  # [B, T, H + G, Q], queries and keys in one kernel
        queries, keys = rotated[:, :, : self.num_heads], rotated[:, :, self.num_heads :]
        mixed = attend(
            queries.transpose(1, 2),  # [B, H, T, Q]
            keys.transpose(1, 2),  # [B, G, T, Q]
            values.transpose(1, 2),
            dropout=0.0,
            cache=cache,
            documents=documents,
            context=self.context,
        )  # [B, H, T, Q]
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, num_tokens, -1))
        return out


class Mlp(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    tensor_parallel: ClassVar[dict[str, ParallelStyle]] = {"gate": "columns", "up": "columns", "out": "rows"}

    def __init__(self, *, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate = Linear(hidden_size, ffn_hidden_size, bias=False)
        self.up = Linear(hidden_size, ffn_hidden_size, bias=False)
        self.out = Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, W] -> [B, T, W]"""
        out: Tensor = self.out(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Pre-norm transformer block: attention, then the MLP."""

    tensor_parallel: ClassVar[dict[str, ParallelStyle]] = {"attention_norm": "norm", "mlp_norm": "norm"}

    def __init__(self, *, attention: nn.Module, mlp: nn.Module, hidden_size: int, rms_eps: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden_size, eps=rms_eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(hidden_size, eps=rms_eps)
        self.mlp = mlp

    def forward(
        self, x: Tensor, rotation: Rotation, cache: LayerCache | None = None, documents: Documents | None = None
    ) -> Tensor:
        """[B, T, W] -> [B, T, W]"""
        x = x + self.attention(self.attention_norm(x), rotation, cache, documents)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out
