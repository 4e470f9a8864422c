"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU. 6 N + 12 L W T FLOPs per token.

Shapes: B sequences, T tokens, W hidden_size, H heads, Q = W / H head size, V padded vocabulary.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.errors import ConfigError
from recipes.model.decoder import Head, attend, padded_vocab_size
from recipes.model.documents import Documents
from recipes.model.flops import Flops, decoder_flops_per_token
from recipes.model.init import init_decoder
from recipes.model.kv_cache import KeyValueCache, LayerCache
from recipes.numerics.linear import Linear
from recipes.parallel.context import ContextRanks
from recipes.parallel.tensor import Cut, TensorRanks


class Attention(nn.Module):
    """Multi-head causal self-attention; one matrix projects to queries, keys and values.

    Attributes:
        context: Ranks that divide the sequence; None: this rank has all of it.
    """

    tensor_parallel: ClassVar[dict[str, Cut]] = {"qkv": "columns", "out": "rows"}
    context: ContextRanks | None = None

    def __init__(self, *, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.dropout = dropout
        self.qkv = Linear(hidden_size, 3 * hidden_size)
        self.out = Linear(hidden_size, hidden_size)

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """Return the rows of queries, keys and values, which an optimizer of matrices must not treat as one matrix."""
        return {"qkv.weight": (self.qkv.in_features,) * 3}

    def split_heads(self, num_ranks: int) -> None:
        """Keep the share of the heads of one of several ranks, which divide `qkv` and `out`."""
        self.num_heads //= num_ranks

    def forward(self, x: Tensor, cache: LayerCache | None, documents: Documents | None) -> Tensor:
        """[B, T, W] -> [B, T, W]"""
        batch, num_tokens, _ = x.shape
        heads = self.qkv(x).view(batch, num_tokens, 3, self.num_heads, self.head_dim)
        # split along the axis of three: the backward pass then writes the gradient of `heads` once
        queries, keys, values = (part.transpose(1, 2) for part in heads.unbind(2))  # [B, H, T, Q] each, views
        dropout = self.dropout if self.training else 0.0
        mixed = attend(
            queries, keys, values, dropout=dropout, cache=cache, documents=documents, context=self.context
        )  # [B, H, T, Q]
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, num_tokens, -1))
        return out


class Mlp(nn.Module):
    """Two linear layers with 4 W units between them."""

    tensor_parallel: ClassVar[dict[str, Cut]] = {"up": "columns", "out": "rows"}

    def __init__(self, *, hidden_size: int) -> None:
        super().__init__()
        self.up = Linear(hidden_size, 4 * hidden_size)
        self.out = Linear(4 * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, W] -> [B, T, W]"""
        out: Tensor = self.out(F.gelu(self.up(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """Attention, then the MLP, each on a normalized copy of the residual stream."""

    tensor_parallel: ClassVar[dict[str, Cut]] = {"attention_norm": "norm", "mlp_norm": "norm"}

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


class GPT2(nn.Module):
    """Decoder-only transformer with learned positions; weights interchange with `GPT2LMHeadModel`.

    Args:
        vocab_size: Number of tokens, without padding.
        max_seq_len: Number of learned positions; longer inputs are rejected.
        num_layers: Number of blocks.
        num_heads: Attention heads; divides `hidden_size`.
        hidden_size: W, width of the residual stream.
        dropout: Probability, on the embedding, attention weights and residual branches.
        vocab_pad_multiple: Embedding rows are rounded up to a multiple of this; 1: no padding.
        tie_embeddings: The head uses the weight of the token embedding.
        pretrained: Folder or hub name of weights to start from; None: `init_weights`.

    Raises:
        ConfigError: `num_heads` does not divide `hidden_size`.
    """

    input_kind: ClassVar[str] = "tokens"
    tensor_parallel: ClassVar[dict[str, Cut]] = {
        "embedding": "vocabulary",
        "position": "positions",
        "norm": "norm",
        "head": "vocabulary",
    }
    pipeline_ends: ClassVar[tuple[tuple[str, ...], ...]] = (("embedding", "position"), ("norm", "head"))
    context: ContextRanks | None = None
    ranks: TensorRanks | None = None

    def __init__(
        self,
        *,
        vocab_size: Annotated[int, ">= 2"],
        max_seq_len: Annotated[int, ">= 1"],
        num_layers: Annotated[int, ">= 1"],
        num_heads: Annotated[int, ">= 1"],
        hidden_size: Annotated[int, ">= 1"],
        dropout: Annotated[float, ">= 0, <= 0.999"],
        vocab_pad_multiple: Annotated[int, ">= 1"] = 64,
        tie_embeddings: bool = True,
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        _check_heads(num_heads, hidden_size=hidden_size)
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.hidden_size = hidden_size
        self.tie_embeddings = tie_embeddings
        self.pretrained = pretrained
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

    def _tie(self) -> None:
        if self.tie_embeddings and None not in (self.embedding, self.head):  # two stages of a pipeline have copies
            self.head.weight = self.embedding.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the parameters; tie again, because `to_empty` gives each module its own parameter."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self

    def forward(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        reduce: Callable[[Tensor, Tensor], Any] | None = None,
        positions: Tensor | None = None,
    ) -> Any:
        """Return the logits of the next token.

        Args:
            tokens: [B, T] int64; hidden states [B, T, W] for a later stage of a pipeline, which has no embedding.
            cache: Earlier tokens of the same sequences, extended by this call; None: no earlier tokens.
            reduce: Called with the last hidden states [B, T, W] and the weight of the head [V, W] instead of computing
                logits; what it returns is returned.
            positions: [B, T] of each token in its document, 0 begins one; None: a row is one document. Of all tokens
                also where ranks divide the sequence and `tokens` are a part of it.

        Returns:
            [B, T, V] in the compute dtype, -inf in padded columns; with a cache only the last position, [B, 1, V].
            Hidden states [B, T, W] for an earlier stage of a pipeline, which has no head.
        """
        num_tokens = tokens.shape[1] if self.ranks is None else self.ranks.count_tokens(tokens)
        first = 0 if self.context is None or cache is not None else self.context.rank * num_tokens
        end = first + num_tokens if cache is None else cache.end(num_tokens)
        assert end <= self.max_seq_len, f"{end} tokens > max_seq_len {self.max_seq_len}"
        documents = None
        if positions is not None:
            documents = Documents(positions, dropout=self.dropout.p if self.training else 0.0)
            positions = positions[:, first:end]
        elif cache is not None:
            positions = cache.positions(num_tokens, device=tokens.device)  # [T] or [B, T]
        else:
            positions = torch.arange(first, end, device=tokens.device)  # [T]
        x = tokens  # [B, T, W]
        if self.embedding is not None:
            x = self.dropout(self.embedding(tokens) + self.position(positions))
        for index, block in self.blocks.named_children():
            x = block(x, None if cache is None else cache.layers[int(index)], documents)
        if self.head is None:
            return x
        if cache is not None:
            x = cache.last(x)  # [B, 1, W]
        return self.head(self.norm(x), reduce)

    def init_weights(self, seed: int) -> None:
        """Set every parameter in place, from (seed, name, shape); see `init_decoder`."""
        init_decoder(self, seed=seed, num_layers=self.num_layers, vocab_size=self.vocab_size)

    def init_buffers(self) -> None:
        """Do nothing: GPT-2 has no buffers."""

    def flops_per_token(self, seq_len: int) -> Flops:
        """Return the FLOPs per trained token at `seq_len`, forward and backward."""
        return decoder_flops_per_token(
            self, embedding=self.embedding, attention_width=self.hidden_size, seq_len=seq_len
        )


def _check_heads(num_heads: int, *, hidden_size: int) -> None:
    if hidden_size % num_heads != 0:
        raise ConfigError(
            f"model.num_heads={num_heads}",
            f"heads split model.hidden_size={hidden_size} evenly and {hidden_size} / {num_heads} is no integer",
            f"model.hidden_size={math.ceil(hidden_size / num_heads) * num_heads}",
        )
