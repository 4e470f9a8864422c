"""Key-value cache of a decoder, which reduces generation to one single-token forward pass per new token.

Shapes: B sequences, G key-value heads, T new tokens, L tokens in the cache including them, Q head size.
"""

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer; the first `append` allocates the memory, in the dtype of its arguments.

    Args:
        capacity: Maximum number of tokens.
        padding: As for `KeyValueCache`.

    Attributes:
        length: Tokens in the cache, including padding.
    """

    def __init__(self, *, capacity: int, padding: Tensor | None = None) -> None:
        self.capacity = capacity
        self.length = 0
        self._padding = padding
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of T new tokens, [B, G, T, Q]; return views of all L tokens, [B, G, L, Q]."""
        batch, heads, num_new, size = keys.shape
        if self._keys is None or self._values is None:
            # zeros, not empty: unfilled slots are masked, but 0 times NaN would be NaN
            self._keys = keys.new_zeros(batch, heads, self.capacity, size)  # [B, G, capacity, Q]
            self._values = values.new_zeros(batch, heads, self.capacity, size)
        end = self.length + num_new
        assert end <= self.capacity, f"{self.length} + {num_new} tokens > capacity {self.capacity}"
        slots = new_positions(self.length, num_new, padding=self._padding, device=keys.device)
        if slots.ndim == 1:
            self._keys[:, :, self.length : end] = keys
            self._values[:, :, self.length : end] = values
        else:
            rows = torch.arange(batch, device=keys.device)[:, None]  # [B, 1]
            self._keys[rows, :, slots] = keys.transpose(1, 2)  # [B, T, G, Q] by the rules of advanced indexing
            self._values[rows, :, slots] = values.transpose(1, 2)
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def mask(self, num_new: int, *, device: torch.device) -> Tensor | None:
        """Return where the last T tokens may attend: bool [T, L] or [B, 1, T, L]; None: everywhere.

        Also None for the first tokens of a cache, whose attention is causal.
        """
        start = self.length - num_new
        if start == 0:
            return None
        positions = new_positions(start, num_new, padding=self._padding, device=device)  # [T] or [B, T]
        if positions.ndim == 1 and num_new == 1:
            return None
        reaches = torch.arange(self.length, device=device) <= positions[..., None]  # [T, L] or [B, T, L]
        return reaches if reaches.ndim == 2 else reaches[:, None]


class KeyValueCache:
    """One `LayerCache` per layer; positions are implicit: token i of a sequence is at position i.

    Args:
        num_layers: Number of blocks of the model.
        capacity: Maximum number of tokens, including padding.
        padding: For sequences of different lengths: [B] number of padding tokens at the end of each row of the first
            forward pass, which later tokens overwrite. None: no padding.

    Attributes:
        padding: May be increased by 1 before a forward pass for a finished sequence: its last token is replaced.
    """

    def __init__(self, *, num_layers: int, capacity: int, padding: Tensor | None = None) -> None:
        self.layers = [LayerCache(capacity=capacity, padding=padding) for _ in range(num_layers)]
        self.padding = padding

    @property
    def length(self) -> int:
        """Tokens in the cache, including padding, before the next forward pass."""
        return max(layer.length for layer in self.layers)  # a pipeline stage fills only its own layers

    def end(self, num_new: int) -> int:
        """Return the number of positions in use after T more tokens; with padding, 0 after the first forward pass."""
        return 0 if self.padding is not None and self.length else self.length + num_new

    def positions(self, num_new: int, *, device: torch.device) -> Tensor:
        """Return the positions of the next T tokens: [T], or [B, T] if they differ between sequences."""
        return new_positions(self.length, num_new, padding=self.padding, device=device)

    def last(self, hidden: Tensor) -> Tensor:
        """Return the hidden state [B, 1, W] of the last token of each sequence, given those of new tokens [B, T, W]."""
        num_new = hidden.shape[1]
        if self.padding is None or num_new < self.length:
            return hidden[:, -1:]
        index = num_new - 1 - self.padding  # [B]
        return hidden[torch.arange(len(hidden), device=hidden.device), index][:, None]

    def clear(self) -> None:
        """Remove all tokens but keep the memory."""
        for layer in self.layers:
            layer.length = 0


def new_positions(held: int, num_new: int, *, padding: Tensor | None, device: torch.device) -> Tensor:
    """Return the positions of T tokens after `held` tokens: [T], or [B, T] if some of those were padding."""
    positions = torch.arange(held, held + num_new, device=device)  # [T]
    return positions if padding is None or held == 0 else positions - padding[:, None]
