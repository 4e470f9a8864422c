"""Base class of decoders: forward pass, fused causal attention, and vocabulary padding.

Shapes: B sequences, H query heads, G key-value heads (G divides H), T new tokens, L tokens in the cache including
them, Q head size, W hidden size, V padded vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.model.documents import Documents, attend_blocks
from recipes.model.flops import Flops, decoder_flops_per_token
from recipes.model.init import init_decoder
from recipes.model.kv_cache import KeyValueCache, LayerCache
from recipes.model.score import uses_head
from recipes.numerics.linear import Linear, linear
from recipes.parallel.context import ContextRanks
from recipes.parallel.tensor import TensorRanks


class Head(Linear):
    """Output projection, hidden states -> logits; logits of padding rows are -inf.

    Args:
        hidden_size: W.
        num_rows: V', including padding.
        vocab_size: V.

    Attributes:
        ranks: Ranks that shard the vocabulary; None: not sharded.
    """

    ranks: TensorRanks | None = None

    def __init__(self, hidden_size: int, num_rows: int, *, vocab_size: int) -> None:
        super().__init__(hidden_size, num_rows, bias=False)
        self.vocab_size = vocab_size

    @override
    def forward(self, x: Tensor, reduce: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """Return logits [..., V'] of x [..., W], or the result of `reduce` for x and the weight [V', W].

        A chunked loss is computed here rather than by the caller because engines that shard weights gather this
        module's weight only during its forward pass. If the vocabulary is sharded, the weight is this rank's rows.
        """
        if self.ranks is None:
            weight: Tensor = self.weight
        else:
            x, weight = self.ranks.gather_input(x), self.ranks.local(self.weight)
        if reduce is not None:
            return reduce(x, weight)
        logits = linear(x, weight)
        if self.ranks is not None:
            logits = self.ranks.join_columns(logits)
        return hide_padding(logits, vocab_size=self.vocab_size)


class Decoder(nn.Module):
    """Tokens -> logits through `embedding`, the blocks of a subclass, and `head`; embedding and head may be tied.

    Attributes:
        attention_dropout: Dropout probability of attention weights in training.
        context: Context-parallel ranks; None: the sequence is not sharded.
        ranks: Tensor-parallel ranks; None: matrices are not sharded.
    """

    vocab_size: int
    max_seq_len: int
    num_layers: int
    tie_embeddings: bool
    hidden_size: int
    embedding: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.Module
    head: Head
    attention_dropout: float = 0.0
    context: ContextRanks | None = None
    ranks: TensorRanks | None = None

    def _tie(self) -> None:
        if self.tie_embeddings and None not in (self.embedding, self.head):  # first and last pipeline stage hold copies
            self.head.weight = self.embedding.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the parameters; tie again, because `to_empty` gives each module its own parameter."""
        super()._apply(fn, recurse)
        self._tie()
        return self

    def forward(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        reduce: Callable[[Tensor, Tensor], Any] | None = None,
        positions: Tensor | None = None,
        num_inputs: Tensor | None = None,
        branches: Tensor | None = None,
    ) -> Any:
        """Return next-token logits.

        Args:
            tokens: [B, T] int64; hidden states [B, T, W] for a later pipeline stage, which has no embedding.
            cache: Earlier tokens of the same sequences, extended by this call; None: no earlier tokens.
            reduce: Called with the final hidden states [B, T, W] and the head weight [V, W] instead of computing
                logits; its result is returned.
            positions: [B, T] position of each token in its document, 0 at its start; None: a row is one document.
                Under context parallelism, positions of all tokens, although `tokens` holds this rank's shard.
            num_inputs: [B] number of inputs of each row that are tokens; the rest is padding, which a model with
                statistics over tokens leaves out of them. Of whole rows, as `positions`. None: no padding.
            branches: [B, T] branch of each token of its document, see `Documents`; None: documents have none.

        Returns:
            [B, T, V] in the compute dtype, -inf in padded columns; with a cache only the last position, [B, 1, V].
            Hidden states [B, T, W] for an earlier pipeline stage, which has no head.
        """
        num_tokens = tokens.shape[1] if self.ranks is None else self.ranks.count_tokens(tokens)
        first = 0 if self.context is None or cache is not None else self.context.rank * num_tokens
        end = first + num_tokens if cache is None else cache.end(num_tokens)
        # a row with branches may be longer than each of them
        assert branches is not None or end <= self.max_seq_len, f"{end} tokens > max_seq_len {self.max_seq_len}"
        documents = None
        rows: Tensor | slice = slice(first, end)
        if positions is not None:
            dropout = self.attention_dropout if self.training else 0.0
            documents = Documents(positions, branches=branches, dropout=dropout)
            rows = positions[:, first:end]
        elif cache is not None:
            rows = cache.positions(num_tokens, device=tokens.device)  # [T] or [B, T]
        is_token = None
        if num_inputs is not None:
            is_token = torch.arange(first, end, device=tokens.device) < num_inputs[:, None]  # [B, T]
        x = self._compute_hidden(tokens, rows, cache, documents, is_token)
        if self.head is None:
            return x
        last = x if cache is None else cache.last(x)  # [B, T, W] or [B, 1, W]
        return self.head(self.norm(last), reduce)

    @abstractmethod
    def _compute_hidden(
        self,
        tokens: Tensor,
        rows: Tensor | slice,
        cache: KeyValueCache | None,
        documents: Documents | None,
        is_token: Tensor | None,
    ) -> Tensor:
        """Run the blocks on tokens at positions `rows` and return [B, T, W]; tokens as for `forward`.

        Args:
            tokens: As for `forward`.
            rows: Positions of the tokens.
            cache: As for `forward`.
            documents: Documents of packed rows.
            is_token: [B, T] bool, False for padding; None: no padding.
        """

    def init_weights(self, seed: int) -> None:
        """Initialize every parameter and buffer in place, from (seed, name, shape); see `init_decoder`."""
        init_decoder(self, seed=seed, num_layers=self.num_layers, vocab_size=self.vocab_size)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Do nothing: this class has no buffers."""

    @property
    def attention_width(self) -> int:
        """Number of query heads times head size."""
        return self.hidden_size

    def flops_per_token(self, seq_len: float) -> Flops:
        """Return the FLOPs per trained token at `seq_len`, forward and backward."""
        return decoder_flops_per_token(
            self,
            embedding=self.embedding,
            head=self.head,
            uses_head=uses_head(self),
            attention_width=len(self.blocks) * self.attention_width,
            seq_len=seq_len,
        )


def check_heads(num_heads: int, *, hidden_size: int) -> None:
    """Raise a ConfigError unless the number of heads divides the hidden size."""
    if hidden_size % num_heads != 0:
        raise ConfigError(
            f"model.num_heads={num_heads}",
            f"heads split model.hidden_size={hidden_size} evenly, and {hidden_size} is not divisible by {num_heads}",
            f"model.hidden_size={-(-hidden_size // num_heads) * num_heads}",
        )


_flash_is_allowed = True  # mirrors `torch.backends.cuda`, which torch.compile (2.13) cannot trace


def choose_attention_kernel(name: str) -> None:
    """Select the kernel of scaled dot-product attention on GPUs, for the whole process.

    Args:
        name: `flash`, `cudnn`, `memory_efficient`, `math`, or `auto` to let torch choose among all four.
    """
    global _flash_is_allowed
    _flash_is_allowed = name in ("auto", "flash")
    cuda: Any = torch.backends.cuda
    cuda.enable_flash_sdp(_flash_is_allowed)
    cuda.enable_cudnn_sdp(name in ("auto", "cudnn"))
    cuda.enable_mem_efficient_sdp(name in ("auto", "memory_efficient"))
    cuda.enable_math_sdp(name in ("auto", "math"))


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    dropout: float,
    cache: LayerCache | None,
    documents: Documents | None = None,
    context: ContextRanks | None = None,
) -> Tensor:
    """Return causal scaled dot-product attention; the T x T scores are never stored.

    Args:
        queries: [B, H, T, Q], any strides.
        keys: [B, G, T, Q].
        values: [B, G, T, Q].
        dropout: Probability that an attention weight is dropped; 0.0 outside training.
        cache: Keys and values of earlier tokens, extended by this call; None: no earlier tokens.
        documents: Documents of packed rows; None: a row is one document.
        context: Context-parallel ranks, T being the tokens of this rank; None: the sequence is not sharded. With a
            cache every rank has all tokens.

    Returns:
        [B, H, T, Q], dtype of `queries`.
    """
    if context is not None and cache is None:
        return _attend_in_parts(queries, keys, values, dropout=dropout, documents=documents, context=context)
    mask: Tensor | None = None
    if cache is not None:
        num_new = queries.shape[2]
        keys, values = cache.append(keys, values)  # [B, G, L, Q]
        mask = cache.mask(num_new, device=queries.device)  # [T, L] or [B, 1, T, L]
        if num_new == 1:
            return _attend_once(queries, keys, values, mask, dropout=dropout)
    elif documents is not None:
        if not isinstance(documents.mask, Tensor):
            return attend_blocks(queries, keys, values, documents.mask)
        mask = documents.mask  # [B, 1, T, T]
    return _attend_masked(queries, keys, values, mask, dropout=dropout)


def _attend_once(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, dropout: float) -> Tensor:
    """Return attention of one token of each sequence, [B, H, 1, Q], to all tokens in the cache.

    The heads of a group are the tokens of one head of the kernel: as heads of their own, all keys and values would be
    repeated for every token. On a CPU, the flash kernel takes 2 to 2.5 times as long for one token as two matrix
    products (torch 2.13, 33 to 160 keys).
    """
    grouped = queries.reshape(len(queries), keys.shape[1], -1, queries.shape[-1])  # [B, G, H / G, Q]
    if queries.device.type == "cpu" and queries.dtype == torch.float32 and not dropout:
        scores = (grouped * queries.shape[-1] ** -0.5) @ keys.transpose(-1, -2)  # [B, G, H / G, L]
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        mixed: Tensor = scores.softmax(dim=-1) @ values
    else:
        mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, dropout_p=dropout)
    return mixed.reshape(*queries.shape[:-1], values.shape[-1])


def _attend_in_parts(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    dropout: float,
    documents: Documents | None,
    context: ContextRanks,
) -> Tensor:
    """Return attention for this rank's shard of the tokens, computed by tokens or heads; arguments as for `attend`."""

    def attend_whole(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend(queries, keys, values, dropout=dropout, cache=None, documents=documents)

    mixed = context.exchange(queries, keys, values, attend_whole)
    if mixed is not None:
        return mixed
    keys, values = context.gather(keys, values)  # [B, G, all tokens, Q]
    if documents is None:
        mask = context.causal_rows(queries.shape[2], device=queries.device)
    else:
        mask = context.own_tokens(documents.dense(), dim=2)
    return _attend_masked(queries, keys, values, mask, dropout=dropout)


def _attend_masked(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, dropout: float) -> Tensor:
    """Return masked attention; mask None: causal, or all tokens in the cache."""
    causal = mask is None
    if causal and queries.shape[2] != keys.shape[2]:  # a branch: attention takes no symbolic bool (torch 2.13)
        causal = False  # the cache was not empty
    grouped = keys.shape[1] != queries.shape[1]
    if grouped and (queries.dtype == torch.float32 or not _flash_is_allowed or mask is not None):
        # CUDA has no flash kernel for float32 or with a mask, and the memory-efficient kernel does not support GQA
        # (torch 2.13): the math fallback would store all T x T scores. Repeating the heads costs less.
        repeats = queries.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(repeats, dim=1)  # [B, H, T or L, Q]
        values = values.repeat_interleave(repeats, dim=1)
        grouped = False
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        enable_gqa=grouped,
    )


def padded_vocab_size(vocab_size: int, *, multiple: int) -> int:
    """Return `vocab_size` rounded up to a multiple, for tensor cores.

    50257 -> 50304 rows took build-nanogpt's GPT-2 step from 96 to 93 ms (A100). Padded rows start at zero and their
    gradient is exactly zero, so padding does not change training.
    """
    return -(-vocab_size // multiple) * multiple


def hide_padding(logits: Tensor, *, vocab_size: int) -> Tensor:
    """Set the padded columns to -inf in place, so that they have zero probability; fills only those columns.

    Deliberately outside autograd: the softmax of such a column is 0, and so is the gradient of its logit. Recording
    the fill would add a useless backward pass over all logits. Losses that sum
    log-probabilities over the whole vocabulary (label smoothing) must use `logits[..., :vocab_size]`.

    Args:
        logits: [..., padded V], the output of a linear layer (whose backward pass does not read it).
        vocab_size: V, the number of real columns.
    """
    if logits.shape[-1] > vocab_size:
        with torch.no_grad():
            logits[..., vocab_size:].fill_(float("-inf"))
    return logits
