"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU. 6 N + 12 L W T FLOPs per token.

Shapes: B sequences, T tokens, W hidden_size, H heads, Q = W / H head size, V padded vocabulary.
"""

from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from recipes.model.decoder import Decoder, Head, attend, check_heads, padded_vocab_size
from recipes.model.documents import Documents
from recipes.model.kv_cache import KeyValueCache, LayerCache
from recipes.numerics.linear import Linear
from recipes.parallel.context import ContextRanks
from recipes.parallel.tensor import ParallelStyle


class Attention(nn.Module):
    """Multi-head causal self-attention; one matrix projects to queries, keys and values.

    Attributes:
        context: Context-parallel ranks; None: the sequence is not sharded.
    """

    tensor_parallel: ClassVar[dict[str, ParallelStyle]] = {"qkv": "columns", "out": "rows"}
    context: ContextRanks | None = None

    def __init__(self, *, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.dropout = dropout
        self.qkv = Linear(hidden_size, 3 * hidden_size)
        self.out = Linear(hidden_size, hidden_size)

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """Return the row counts of queries, keys and values, which optimizers such as Muon must treat separately."""
        return {"qkv.weight": (self.qkv.in_features,) * 3}

    def split_heads(self, num_ranks: int) -> None:
        """Set the number of heads to that of one of `num_ranks` tensor-parallel ranks, which shard `qkv` and `out`."""
        self.num_heads //= num_ranks

    def forward(self, x: Tensor, cache: LayerCache | None, documents: Documents | None) -> Tensor:
        """[B, T, W] -> [B, T, W]"""
        batch, num_tokens, _ = x.shape
        heads = self.qkv(x).view(batch, num_tokens, 3, self.num_heads, self.head_dim)
        # unbind along the axis of size three: the backward pass then writes the gradient of `heads` once
        queries, keys, values = (part.transpose(1, 2) for part in heads.unbind(2))  # [B, H, T, Q] each, views
        dropout = self.dropout if self.training else 0.0
        mixed = attend(
            queries, keys, values, dropout=dropout, cache=cache, documents=documents, context=self.context
        )  # [B, H, T, Q]
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, num_tokens, -1))
        return out


class Mlp(nn.Module):
    """Two linear layers with 4 W hidden units."""

    tensor_parallel: ClassVar[dict[str, ParallelStyle]] = {"up": "columns", "out": "rows"}

    def __init__(self, *, hidden_size: int) -> None:
        super().__init__()
        self.up = Linear(hidden_size, 4 * hidden_size)
        self.out = Linear(4 * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, W] -> [B, T, W]"""
        out: Tensor = self.out(F.gelu(self.up(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """Pre-norm transformer block: attention, then the MLP."""

    tensor_parallel: ClassVar[dict[str, ParallelStyle]] = {"attention_norm": "norm", "mlp_norm": "norm"}

    def __init__(self, *, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size=hidden_size, num_heads=num_heads, dropout=dropout)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp = Mlp(hidden_size=hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: LayerCache | None = None, documents: Documents | None = None) -> Tensor:
        """[B, T, W] -> [B, T, W]"""
        x = x + self.dropout(self.attention(self.attention_norm(x), cache, documents))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class GPT2(Decoder):
    """Decoder-only transformer with learned positions; weights are interchangeable with `GPT2LMHeadModel`.

    Args:
        vocab_size: Number of tokens, without padding.
        max_seq_len: Number of learned positions; longer inputs are rejected.
        num_layers: Number of blocks.
        num_heads: Number of attention heads; divides `hidden_size`.
        hidden_size: W, width of the residual stream.
        dropout: Dropout probability on the embedding, attention weights and residual branches.
        vocab_pad_multiple: Embedding rows are rounded up to a multiple of this; 1: no padding.
        tie_embeddings: Whether the head shares the weight of the token embedding.
        pretrained: Folder or hub name of weights to start from; None: `init_weights`.

    Raises:
        ConfigError: `num_heads` does not divide `hidden_size`.
    """

    input_kind: ClassVar[str] = "tokens"
    tensor_parallel: ClassVar[dict[str, ParallelStyle]] = {
        "embedding": "vocabulary",
        "position": "positions",
        "norm": "norm",
        "head": "vocabulary",
    }
    pipeline_ends: ClassVar[tuple[tuple[str, ...], ...]] = (("embedding", "position"), ("norm", "head"))
    context: ContextRanks | None = None

    def __init__(
        self,
        *,
        vocab_size: Annotated[int, ">= 2, <= 16777216"],
        max_seq_len: Annotated[int, ">= 1, <= 16777216"],
        num_layers: Annotated[int, ">= 1, <= 1024"],  # built one by one, also where only the plan is made
        num_heads: Annotated[int, ">= 1"],
        hidden_size: Annotated[int, ">= 1, <= 1048576"],
        dropout: Annotated[float, ">= 0, <= 0.999"],
        vocab_pad_multiple: Annotated[int, ">= 1"] = 64,
        tie_embeddings: bool = True,
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        check_heads(num_heads, hidden_size=hidden_size)
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.hidden_size = hidden_size
        self.tie_embeddings = tie_embeddings
        self.pretrained = pretrained
        self.attention_dropout = dropout
        num_rows = padded_vocab_size(vocab_size, multiple=vocab_pad_multiple)
        self.embedding = nn.Embedding(num_rows, hidden_size)
        self.position = nn.Embedding(max_seq_len, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(hidden_size=hidden_size, num_heads=num_heads, dropout=dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_size)
        self.head = Head(hidden_size, num_rows, vocab_size=vocab_size)
        self._tie()

    @override
    def _compute_hidden(
        self,
        tokens: Tensor,
        rows: Tensor | slice,
        cache: KeyValueCache | None,
        documents: Documents | None,
        is_token: Tensor | None,
    ) -> Tensor:
        x: Tensor = tokens  # [B, T, W]
        if self.embedding is not None:
            if isinstance(rows, slice):
                rows = torch.arange(rows.start, rows.stop, device=tokens.device)  # [T]
            x = self.dropout(self.embedding(tokens) + self.position(rows))
        for index, block in self.blocks.named_children():
            x = block(x, None if cache is None else cache.layers[int(index)], documents)
        return x
