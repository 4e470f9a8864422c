"""Llama (arXiv:2302.13971, 2407.21783): RMSNorm, RoPE, SwiGLU, GQA. 6 N + 12 L H Q T FLOPs per token.

Shapes: B sequences, T tokens, W hidden_size, H query heads, Q head size, V padded vocabulary.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from recipes.errors import ConfigError
from recipes.model.decoder import Head, padded_vocab_size
from recipes.model.documents import Documents
from recipes.model.flops import Flops, decoder_flops_per_token
from recipes.model.init import init_decoder
from recipes.model.kv_cache import KeyValueCache
from recipes.model.llama_block import Attention, Block, Mlp
from recipes.model.rope import Rotation, rope_tables
from recipes.numerics.rms_norm import RMSNorm
from recipes.parallel.context import ContextRanks
from recipes.parallel.tensor import Cut, TensorRanks


class Llama(nn.Module):
    """Decoder-only transformer; weights interchange with `LlamaForCausalLM` (`qk_norm`: Qwen3's).

    Args:
        vocab_size: Number of tokens, without padding.
        max_seq_len: Positions in the rotary tables; longer inputs are rejected.
        num_layers: Number of blocks.
        num_heads: H, query heads.
        num_kv_heads: Key-value heads; divides `num_heads`.
        hidden_size: W, width of the residual stream.
        ffn_hidden_size: Width between the linear layers of the MLP.
        rope_theta: Base of the rotary wavelengths, in positions.
        rope_scaling_factor: Factor by which Llama 3.1 stretches long wavelengths (8; Llama 3.2: 32); None disables it.
        rms_eps: Added to the mean square.
        head_dim: Q, channels per head; None: `hidden_size / num_heads`.
        tie_embeddings: The head uses the weight of the token embedding.
        qk_norm: RMSNorm on each query and key head before its rotation, as in Qwen3.
        vocab_pad_multiple: Embedding rows are rounded up to a multiple of this; 1: no padding.
        pretrained: Folder or hub name of weights to start from; None: `init_weights`.

    Raises:
        ConfigError: Heads do not divide what they split.
    """

    input_kind: ClassVar[str] = "tokens"
    tensor_parallel: ClassVar[dict[str, Cut]] = {"embedding": "vocabulary", "norm": "norm", "head": "vocabulary"}
    pipeline_ends: ClassVar[tuple[tuple[str, ...], ...]] = (("embedding",), ("norm", "head"))
    context: ContextRanks | None = None
    ranks: TensorRanks | None = None
    rope_cos: Tensor  # [max_seq_len, Q / 2] float32
    rope_sin: Tensor  # [max_seq_len, Q / 2] float32

    def __init__(
        self,
        *,
        vocab_size: Annotated[int, ">= 2"],
        max_seq_len: Annotated[int, ">= 1"],
        num_layers: Annotated[int, ">= 1"],
        num_heads: Annotated[int, ">= 1"],
        num_kv_heads: Annotated[int, ">= 1"],
        hidden_size: Annotated[int, ">= 1"],
        ffn_hidden_size: Annotated[int, ">= 1"],
        rope_theta: float,
        rope_scaling_factor: float | None = None,
        rms_eps: float = 1e-5,
        head_dim: int | None = None,
        tie_embeddings: bool = False,
        qk_norm: bool = False,
        vocab_pad_multiple: Annotated[int, ">= 1"] = 64,
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        _check_heads(num_heads, num_kv_heads=num_kv_heads, hidden_size=hidden_size, head_dim=head_dim)
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.rope_theta = rope_theta
        self.rope_scaling_factor = rope_scaling_factor
        self.rms_eps = rms_eps
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        if self.rotated_dim % 2:
            raise ConfigError(
                f"model.hidden_size={hidden_size}" if head_dim is None else f"model.head_dim={head_dim}",
                f"rotary positions rotate pairs of channels and a head has {self.head_dim}",
                f"model.head_dim={self.head_dim + 1}",
            )
        self.tie_embeddings = tie_embeddings
        self.qk_norm = qk_norm
        self.pretrained = pretrained
        self._build(num_rows=padded_vocab_size(vocab_size, multiple=vocab_pad_multiple))

    def _build(self, *, num_rows: int) -> None:
        self.embedding = nn.Embedding(num_rows, self.hidden_size)
        self.blocks = nn.ModuleList(self._build_block(index) for index in range(self.num_layers))
        self.norm = RMSNorm(self.hidden_size, eps=self.rms_eps)
        self.head = Head(self.hidden_size, num_rows, vocab_size=self.vocab_size)
        self._tie()
        self._allocate_tables(device=self.embedding.weight.device)
        self.init_buffers()

    def _build_block(self, index: int) -> nn.Module:
        mlp = Mlp(hidden_size=self.hidden_size, ffn_hidden_size=self.ffn_hidden_size)
        attention = self._build_attention()
        return Block(attention=attention, mlp=mlp, hidden_size=self.hidden_size, rms_eps=self.rms_eps)

    @property
    def rotated_dim(self) -> int:
        """Channels of a head that have a position."""
        return self.head_dim

    @property
    def attention_width(self) -> int:
        """Mean of the query-key width and the value width, summed over heads."""
        return self.num_heads * self.head_dim

    def _build_attention(self) -> nn.Module:
        return Attention(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_eps=self.rms_eps,
            qk_norm=self.qk_norm,
        )

    def _tie(self) -> None:
        if self.tie_embeddings and None not in (self.embedding, self.head):  # two stages of a pipeline have copies
            self.head.weight = self.embedding.weight

    def _allocate_tables(self, *, device: torch.device) -> None:
        for name in ("rope_cos", "rope_sin"):
            table = torch.empty(self.max_seq_len, self.rotated_dim // 2, dtype=torch.float32, device=device)
            self.register_buffer(name, table, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the parameters; tie again, because `to_empty` gives each module its own parameter.

        The rotary tables stay float32: bfloat16 cannot distinguish positions above 256.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        if self.rope_cos.dtype != torch.float32:
            self._allocate_tables(device=self.rope_cos.device)
            self._fill_tables()
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
        rows: Tensor | slice = slice(first, end)
        if positions is not None:
            documents, rows = Documents(positions, dropout=0.0), positions[:, first:end]
        elif cache is not None:
            rows = cache.positions(num_tokens, device=tokens.device)  # [T] or [B, T]
        rotation = Rotation(
            cos=self.rope_cos[rows].unsqueeze(-2),  # [T, 1, Q / 2], or [B, T, 1, Q / 2]
            sin=self.rope_sin[rows].unsqueeze(-2),
        )
        x = tokens if self.embedding is None else self.embedding(tokens)  # [B, T, W]
        x = self._run_blocks(x, rotation, cache, documents)
        if self.head is None:
            return x
        if cache is not None:
            x = cache.last(x)  # [B, 1, W]
        return self.head(self.norm(x), reduce)

    def _run_blocks(
        self, x: Tensor, rotation: Rotation, cache: KeyValueCache | None, documents: Documents | None
    ) -> Tensor:
        for index, block in self.blocks.named_children():
            x = block(x, rotation, None if cache is None else cache.layers[int(index)], documents)
        return x

    def init_weights(self, seed: int) -> None:
        """Set every parameter and buffer in place, from (seed, name, shape); see `init_decoder`."""
        init_decoder(self, seed=seed, num_layers=self.num_layers, vocab_size=self.vocab_size)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Fill the rotary tables in place; do nothing on the meta device."""
        self._fill_tables()

    @torch.no_grad()
    def _fill_tables(self) -> None:
        if self.rope_cos.is_meta:
            return
        cos, sin = rope_tables(
            self.max_seq_len,
            head_size=self.rotated_dim,
            theta=self.rope_theta,
            scaling_factor=self.rope_scaling_factor,
        )
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(sin)

    def flops_per_token(self, seq_len: int) -> Flops:
        """Return the FLOPs per trained token at `seq_len`, forward and backward."""
        return decoder_flops_per_token(
            self,
            embedding=self.embedding,
            attention_width=self.attention_width,
            seq_len=seq_len,
        )


def _check_heads(num_heads: int, *, num_kv_heads: int, hidden_size: int, head_dim: int | None) -> None:
    if head_dim is None and hidden_size % num_heads != 0:
        raise ConfigError(
            f"model.num_heads={num_heads}",
            f"heads split model.hidden_size={hidden_size} evenly and {hidden_size} / {num_heads} is no integer",
            f"model.hidden_size={math.ceil(hidden_size / num_heads) * num_heads}",
        )
    if num_heads % num_kv_heads != 0:
        raise ConfigError(
            f"model.num_kv_heads={num_kv_heads}",
            f"query heads share them evenly and {num_heads} / {num_kv_heads} is no integer",
            f"model.num_kv_heads={math.gcd(num_heads, num_kv_heads)}",
        )
