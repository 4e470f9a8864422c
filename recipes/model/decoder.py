"""What every decoder shares: causal attention in one fused kernel, and the padded vocabulary.

Shapes: B sequences, H query heads, G key-value heads (G divides H), T new tokens, L tokens held in the cache after
them, Q head size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from recipes.model.documents import Documents, attend_blocks
from recipes.model.kv_cache import LayerCache
from recipes.numerics.linear import Linear


class Head(Linear):
    """Hidden states -> logits of the vocabulary; the rows that pad it are -inf.

    Args:
        hidden_size: W.
        num_rows: V', padding included.
        vocab_size: V.
    """

    def __init__(self, hidden_size: int, num_rows: int, *, vocab_size: int) -> None:
        super().__init__(hidden_size, num_rows, bias=False)
        self.vocab_size = vocab_size

    @override
    def forward(self, x: Tensor, reduce: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """Return logits [..., V'] of x [..., W], or what `reduce` makes of x and the weight [V', W].

        A loss that needs no more than some logits at a time is computed in here and not by the caller: engines that
        shard weights gather this one while the module runs.
        """
        if reduce is not None:
            return reduce(x, self.weight)
        return hide_padding(super().forward(x), vocab_size=self.vocab_size)


_flash_is_allowed = True  # as `torch.backends.cuda` knows, which the compiler (torch 2.13) cannot ask


def choose_attention_kernel(name: str) -> None:
    """Let torch's attention use one kernel on GPUs, or any of them, for the whole process.

    Args:
        name: `flash`, `cudnn`, `memory_efficient`, `math`, or `auto` for torch's choice among all four.
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
) -> Tensor:
    """Return causal scaled dot-product attention; the T x T scores are never stored.

    Args:
        queries: [B, H, T, Q], any strides.
        keys: [B, G, T, Q].
        values: [B, G, T, Q].
        dropout: Probability that an attention weight is dropped; 0.0 outside training.
        cache: Keys and values of earlier tokens, extended by this call; None: no earlier tokens.
        documents: Of the rows, where they are packed; None: a row is one document.

    Returns:
        [B, H, T, Q], dtype of `queries`.
    """
    mask: Tensor | None = None
    if cache is not None:
        num_new = queries.shape[2]
        keys, values = cache.append(keys, values)  # [B, G, L, Q]
        mask = cache.mask(num_new, device=queries.device)  # [T, L] or [B, 1, T, L]
    elif documents is not None:
        if not isinstance(documents.mask, Tensor):
            return attend_blocks(queries, keys, values, documents.mask)
        mask = documents.mask  # [B, 1, T, T]
    causal = mask is None and queries.shape[2] == keys.shape[2]  # a cache that was empty: the plain causal case
    grouped = keys.shape[1] != queries.shape[1]
    if grouped and (queries.dtype == torch.float32 or not _flash_is_allowed or mask is not None):
        # CUDA has no flash kernel for float32 or with a mask, and the memory-efficient kernel takes no groups (torch
        # 2.13): the math kernel that remains would store all T x T scores. Copying the heads costs less.
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
    """Return `vocab_size` rounded up to a multiple, which tensor cores need.

    50257 -> 50304 rows took build-nanogpt's GPT-2 step from 96 to 93 ms (A100). Padded rows start at zero and their
    gradient is exactly zero, so a padded model trains like the unpadded one.
    """
    return -(-vocab_size // multiple) * multiple


def hide_padding(logits: Tensor, *, vocab_size: int) -> Tensor:
    """Set the padded columns to -inf, in place, so that they get no probability; costs one fill of a few columns.

    Deliberately outside autograd: the softmax of such a column is 0, and so is the gradient of its logit. Recording
    the fill would add a backward pass over all logits that multiplies zeros by zero. Losses that sum
    log-probabilities over the whole vocabulary (label smoothing) must use `logits[..., :vocab_size]`.

    Args:
        logits: [..., padded V], the output of a linear layer (whose backward pass does not read it).
        vocab_size: V, the number of real columns.
    """
    if logits.shape[-1] > vocab_size:
        with torch.no_grad():
            logits[..., vocab_size:].fill_(float("-inf"))
    return logits
