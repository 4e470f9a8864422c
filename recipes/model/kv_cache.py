"""Keys and values of the tokens already seen: 2 L C H Q numbers a sequence.

Shapes: B sequences, H key-value heads, T new tokens, C capacity, Q head size, L layers.
"""

import torch
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
