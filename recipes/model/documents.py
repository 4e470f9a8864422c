"""Documents packed into one row: a token attends to the tokens before it in its own document, and to no other.

On a GPU, compiled blocks use FlexAttention, which skips what the mask leaves out; elsewhere the mask is a bool tensor.

Shapes: B rows, H query heads, G key-value heads, T tokens, Q head size.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

_uses_flex_attention = False


def choose_document_kernel(*, flex_attention: bool) -> None:
    """Let GPUs compute attention within documents by FlexAttention, for the whole process.

    Args:
        flex_attention: Only for compiled blocks: eager, it stores all T x T scores.
    """
    global _uses_flex_attention
    _uses_flex_attention = flex_attention


class Documents:
    """Which tokens of packed rows attend to each other.

    Deliberately a plain class, as `rope.Rotation` is: FSDP2 converts what it finds in others.

    Args:
        positions: [B, T] of each token in its document; 0 begins one.
        dropout: Probability that an attention weight is dropped, which FlexAttention cannot do.

    Attributes:
        mask: Where a token may attend: [B, 1, T, T] bool, or blocks of that.
    """

    def __init__(self, positions: Tensor, *, dropout: float) -> None:
        numbers = self._numbers = number_documents(positions)  # [B, T]
        self.mask: Tensor | BlockMask
        if _uses_flex_attention and positions.is_cuda and dropout == 0.0:
            self.mask = block_mask(numbers)
        else:
            self.mask = dense_mask(numbers)

    def dense(self) -> Tensor:
        """Return the mask as [B, 1, T, T] bool, whatever kernel uses it."""
        return self.mask if isinstance(self.mask, Tensor) else dense_mask(self._numbers)


def number_documents(positions: Tensor) -> Tensor:
    """Return which document of its row each token belongs to, from 1: [B, T] int32."""
    return (positions == 0).cumsum(dim=1, dtype=torch.int32)


def dense_mask(numbers: Tensor) -> Tensor:
    """Return [B, 1, T, T] bool, True where a token (third axis) may attend, for documents numbered [B, T]."""
    same = numbers[:, :, None] == numbers[:, None, :]  # [B, T, T]
    return same.tril()[:, None]


def block_mask(numbers: Tensor) -> BlockMask:
    """Return the same as blocks of 128 x 128, of which empty ones are skipped and full ones are not masked."""
    batch, num_tokens = numbers.shape

    def same_document(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (numbers[row, query] == numbers[row, key])

    create = _compiled_create_block_mask() if numbers.is_cuda else create_block_mask
    return create(same_document, batch, None, num_tokens, num_tokens, device=numbers.device)


@functools.cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    """Compile it once: eager, it writes B T T numbers."""
    return cast(Callable[..., BlockMask], torch.compile(create_block_mask, dynamic=False))


def attend_blocks(queries: Tensor, keys: Tensor, values: Tensor, mask: BlockMask) -> Tensor:
    """Return attention [B, H, T, Q] of queries [B, H, T, Q] to keys and values [B, G, T, Q], masked by blocks."""
    grouped = keys.shape[1] != queries.shape[1]
    attention: Any = flex_attention(queries, keys, values, block_mask=mask, enable_gqa=grouped)
    return cast(Tensor, attention)
