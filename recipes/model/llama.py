"""Llama (arXiv:2302.13971, 2407.21783): RMSNorm, RoPE, SwiGLU, GQA. 6 N + 12 L H Q T FLOPs per token.

Shapes: B sequences, T tokens, W hidden_size, H query heads, Q head size, V padded vocabulary.
"""

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.model.decoder import Decoder, Head, check_heads, padded_vocab_size
from recipes.model.documents import Documents
from recipes.model.kv_cache import KeyValueCache
from recipes.model.llama_block import Attention, Block, Mlp
from recipes.model.rope import Rotation, rope_tables
from recipes.numerics.rms_norm import RMSNorm
from recipes.parallel.context import ContextRanks
from recipes.parallel.tensor import ParallelStyle


class Llama(Decoder):
    """Decoder-only transformer; weights are interchangeable with `LlamaForCausalLM` (`qk_norm`: `Qwen3ForCausalLM`).

    Args:
        vocab_size: Number of tokens, without padding.
        max_seq_len: Positions in the rotary tables; longer inputs are rejected.
        num_layers: Number of blocks.
        num_heads: H, number of query heads.
        num_kv_heads: Number of key-value heads; divides `num_heads`.
        hidden_size: W, width of the residual stream.
        ffn_hidden_size: Hidden width of the MLP.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling_factor: Factor by which Llama 3.1 stretches long wavelengths (8; Llama 3.2: 32); None disables it.
        rms_eps: Epsilon of RMSNorm, added to the mean square.
        head_dim: Q, channels per head; None: `hidden_size / num_heads`.
        tie_embeddings: Whether the head shares the weight of the token embedding.
        qk_norm: Whether to apply RMSNorm to each query and key head before RoPE, as in Qwen3.
        vocab_pad_multiple: Embedding rows are rounded up to a multiple of this; 1: no padding.
        pretrained: Folder or hub name of weights to start from; None: `init_weights`.

    Raises:
        ConfigError: The number of heads does not divide the hidden size, or key-value heads do not divide query heads.
    """

    input_kind: ClassVar[str] = "tokens"
    free_at_resume: ClassVar[tuple[str, ...]] = ("rope_theta", "rope_scaling_factor")  # for longer contexts
    tensor_parallel: ClassVar[dict[str, ParallelStyle]] = {
        "embedding": "vocabulary",
        "norm": "norm",
        "head": "vocabulary",
    }
    pipeline_ends: ClassVar[tuple[tuple[str, ...], ...]] = (("embedding",), ("norm", "head"))
    context: ContextRanks | None = None
    rope_cos: Tensor  # [max_seq_len, Q / 2] float32
    rope_sin: Tensor  # [max_seq_len, Q / 2] float32

    def __init__(
        self,
        *,
        vocab_size: Annotated[int, ">= 2, <= 16777216"],
        max_seq_len: Annotated[int, ">= 1, <= 16777216"],
        num_layers: Annotated[int, ">= 1, <= 1024"],  # built one by one, also where only the plan is made
        num_heads: Annotated[int, ">= 1"],
        num_kv_heads: Annotated[int, ">= 1"],
        hidden_size: Annotated[int, ">= 1, <= 1048576"],
        ffn_hidden_size: Annotated[int, ">= 1, <= 16777216"],
        rope_theta: Annotated[float, "> 0"],
        rope_scaling_factor: Annotated[float, ">= 1"] | None = None,
        rms_eps: Annotated[float, ">= 0"] = 1e-5,
        head_dim: Annotated[int, ">= 2"] | None = None,
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
        """Number of channels per head with RoPE."""
        return self.head_dim

    @property
    @override
    def attention_width(self) -> int:
        """Mean of query-key width and value width, summed over heads."""
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

    def _allocate_tables(self, *, device: torch.device) -> None:
        for name in ("rope_cos", "rope_sin"):
            table = torch.empty(self.max_seq_len, self.rotated_dim // 2, dtype=torch.float32, device=device)
            self.register_buffer(name, table, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the parameters; rotary tables stay float32: in bfloat16, positions above 256 coincide."""
        super()._apply(fn, recurse)
        if self.rope_cos.dtype != torch.float32:
            self._allocate_tables(device=self.rope_cos.device)
            Llama.init_buffers(self)  # not `self.init_buffers`: other buffers of a subclass keep their values
        return self

    @override
    def _compute_hidden(
        self,
        tokens: Tensor,
        rows: Tensor | slice,
        cache: KeyValueCache | None,
        documents: Documents | None,
        is_token: Tensor | None,
    ) -> Tensor:
        rotation = Rotation(
            cos=self.rope_cos[rows].unsqueeze(-2),  # [T, 1, Q / 2], or [B, T, 1, Q / 2]
            sin=self.rope_sin[rows].unsqueeze(-2),
        )
        x = tokens if self.embedding is None else self.embedding(tokens)  # [B, T, W]
        return self._run_blocks(x, rotation, cache, documents, is_token)

    def _run_blocks(
        self,
        x: Tensor,
        rotation: Rotation,
        cache: KeyValueCache | None,
        documents: Documents | None,
        is_token: Tensor | None,
    ) -> Tensor:
        for index, block in self.blocks.named_children():
            x = block(x, rotation, None if cache is None else cache.layers[int(index)], documents)
        return x

    @override
    @torch.no_grad()
    def init_buffers(self) -> None:
        """Fill the rotary tables in place; does nothing on the meta device."""
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


def _check_heads(num_heads: int, *, num_kv_heads: int, hidden_size: int, head_dim: int | None) -> None:
    if head_dim is None:
        check_heads(num_heads, hidden_size=hidden_size)
    if num_heads % num_kv_heads != 0:
        raise ConfigError(
            f"model.num_kv_heads={num_kv_heads}",
            f"query heads share them evenly, and {num_heads} is not divisible by {num_kv_heads}",
            f"model.num_kv_heads={math.gcd(num_heads, num_kv_heads)}",
        )
