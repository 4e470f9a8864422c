"""Causal attention, with a cache or without: one fused kernel, T x T scores are never stored.

Shapes: B sequences, H query heads, G key-value heads (G divides H), T new tokens, Q head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerCache:
    """One layer's keys and values; the first `append` takes the memory, in its dtype."""

    def __init__(self, *, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0  # tokens held
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, H, T, Q] of T new tokens; return views of all held so far, [B, H, length, Q]."""
        batch, heads, num_new, size = keys.shape
        if self._keys is None or self._values is None:
            self._keys = keys.new_empty(batch, heads, self.capacity, size)
            self._values = values.new_empty(batch, heads, self.capacity, size)
        end = self.length + num_new
        assert end <= self.capacity, f"{self.length} + {num_new} tokens > capacity {self.capacity}"
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, dropout: float, cache: LayerCache | None
) -> Tensor:
    """Causal scaled dot-product attention.

    Args:
        queries: [B, H, T, Q], any strides.
        keys: [B, G, T, Q].
        values: [B, G, T, Q].
        dropout: Probability that an attention weight is dropped; 0.0 outside training.
        cache: Keys and values of earlier tokens, extended by this call; None: there are none.

    Returns:
        [B, H, T, Q]
    """
    causal, mask = True, None
    if cache is not None:
        keys, values = cache.append(keys, values)  # [B, G, length, Q]
        num_new, num_held = queries.shape[2], keys.shape[2]
        causal = num_new == num_held  # nothing was held before: the plain case
        if not causal and num_new > 1:
            mask = causal_mask(num_new, num_held=num_held, device=queries.device)
    grouped = keys.shape[1] != queries.shape[1]
    if grouped and queries.dtype == torch.float32:
        # CUDA has no flash kernel for float32 and the memory-efficient one takes no groups (torch
        # 2.13): what is left would store all T x T scores. So the heads are copied.
        repeats = queries.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(repeats, dim=1)  # [B, H, T, Q]
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


class KeyValueCache:
    """One `LayerCache` a layer. Holds no positions: token i of the cache stands at position i."""

    def __init__(self, *, num_layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity=capacity) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens held, before the forward pass that adds more."""
        return self.layers[0].length

    def clear(self) -> None:
        """Forget all tokens; the memory is kept."""
        for layer in self.layers:
            layer.length = 0


def causal_mask(num_new: int, *, num_held: int, device: torch.device) -> Tensor:
    """[T, length] True where a new token may look: at all held before it, and at itself."""
    full = torch.ones(num_new, num_held, dtype=torch.bool, device=device)
    return full.tril(diagonal=num_held - num_new)
