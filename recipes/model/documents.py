"""Attention masks for documents packed into one row: a token attends only to earlier tokens of its own document.

A document may end in several branches, such as completions of one prompt, which do not see each other.

On a GPU, compiled blocks use FlexAttention, which skips fully masked blocks; elsewhere the mask is a bool tensor.

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
    """Choose whether GPUs use FlexAttention for packed documents, for the whole process.

    Args:
        flex_attention: True only for compiled blocks: in eager mode, FlexAttention stores all T x T scores.
    """
    global _uses_flex_attention
    _uses_flex_attention = flex_attention


class Documents:
    """Attention mask of packed rows.

    Deliberately a plain class, like `rope.Rotation`: FSDP2 would cast the tensors in a dataclass, tuple or dict.

    Args:
        positions: [B, T] position of each token in its document, 0 at its start.
        branches: [B, T] branch of each token, from 1; 0: all branches of its document that follow see it. None: there
            are none. Not computed by FlexAttention.
        dropout: Dropout probability of attention weights; not supported by FlexAttention.

    Attributes:
        mask: [B, 1, T, T] bool, True where a token may attend, or the equivalent `BlockMask`.
    """

    def __init__(self, positions: Tensor, *, branches: Tensor | None = None, dropout: float) -> None:
        numbers = self._numbers = number_documents(positions)  # [B, T]
        self.mask: Tensor | BlockMask
        if branches is not None:
            sees = (branches[:, None] == 0) | (branches[:, :, None] == branches[:, None])  # [B, T, T]
            self.mask = dense_mask(numbers) & sees[:, None]
        elif _uses_flex_attention and positions.is_cuda and dropout == 0.0:
            self.mask = block_mask(numbers)
        else:
            self.mask = dense_mask(numbers)

    def dense(self) -> Tensor:
        """Return the mask as [B, 1, T, T] bool for any kernel."""
        return self.mask if isinstance(self.mask, Tensor) else dense_mask(self._numbers)


def number_documents(positions: Tensor) -> Tensor:
    """Return the index of each token's document in its row, from 1: [B, T] int32."""
    return (positions == 0).cumsum(dim=1, dtype=torch.int32)


def dense_mask(numbers: Tensor) -> Tensor:
    """Return [B, 1, T, T] bool, True where a token (third axis) may attend, given document indices [B, T]."""
    same = numbers[:, :, None] == numbers[:, None, :]  # [B, T, T]
    return same.tril()[:, None]


def block_mask(numbers: Tensor) -> BlockMask:
    """Return the mask in blocks of 128 x 128: empty blocks are skipped and full blocks need no masking."""
    batch, num_tokens = numbers.shape

    def same_document(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (numbers[row, query] == numbers[row, key])

    create = _compiled_create_block_mask() if numbers.is_cuda else create_block_mask
    return create(same_document, batch, None, num_tokens, num_tokens, device=numbers.device)


@functools.cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    """Return `create_block_mask`, compiled once: in eager mode it materializes B T T elements."""
    return cast(Callable[..., BlockMask], torch.compile(create_block_mask))


def attend_blocks(queries: Tensor, keys: Tensor, values: Tensor, mask: BlockMask) -> Tensor:
    """Return attention [B, H, T, Q] of queries [B, H, T, Q] to keys and values [B, G, T, Q] under a block mask."""
    grouped = keys.shape[1] != queries.shape[1]
    attention: Any = flex_attention(queries, keys, values, block_mask=mask, enable_gqa=grouped)
    return cast(Tensor, attention)
