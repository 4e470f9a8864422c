"""Key-value cache of a decoder, which reduces generation to one single-token forward pass per new token.

Shapes: B sequences, G key-value heads, T new tokens, L tokens in the cache including them, Q head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Slots:
    """Where new tokens of each sequence are in the cache; shared by its layers, which ask for the same each.

    Args:
        padding: As for `KeyValueCache`.
    """

    def __init__(self, padding: Tensor | None) -> None:
        self.padding = padding
        self._asked: tuple[int, int] | None = None
        self._positions: Tensor | None = None
        self._mask: Tensor | None = None

    def positions(self, held: int, num_new: int, *, device: torch.device) -> Tensor:
        """Return the positions of T tokens after `held`: [T], or [B, T] if some of those were padding."""
        self._ask(held, num_new, device)
        assert self._positions is not None, "computed above"
        return self._positions

    def mask(self, held: int, num_new: int, *, device: torch.device) -> Tensor | None:
        """Return where T tokens after `held` may attend: bool [T, L] or [B, 1, T, L]; None: everywhere."""
        self._ask(held, num_new, device)
        return self._mask

    def keep(self, padding: Tensor | None) -> None:
        """Change the padding."""
        self.padding, self._asked = padding, None

    def _ask(self, held: int, num_new: int, device: torch.device) -> None:
        if self._asked == (held, num_new):
            return
        self._asked = held, num_new
        positions = torch.arange(held, held + num_new, device=device)  # [T]
        if self.padding is not None and held:
            positions = positions - self.padding[:, None]  # [B, T]
        self._positions, self._mask = positions, None
        if held == 0 or (positions.ndim == 1 and num_new == 1):
            return
        reaches = torch.arange(held + num_new, device=device) <= positions[..., None]  # [T, L] or [B, T, L]
        self._mask = reaches if reaches.ndim == 2 else reaches[:, None]


class LayerCache:
    """Keys and values of one layer; the first `append` allocates the memory, in the dtype of its arguments.

    Args:
        capacity: Maximum number of tokens.
        slots: Those of the cache; None: without padding.

    Attributes:
        length: Tokens in the cache, including padding.
    """

    def __init__(self, *, capacity: int, slots: Slots | None = None) -> None:
        self.capacity = capacity
        self.length = 0
        self._slots = Slots(None) if slots is None else slots
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of T new tokens, [B, G, T, Q]; return views of all L tokens, [B, G, L, Q]."""
        batch, _, num_new, _ = keys.shape
        if self._keys is None or self._values is None:
            self._keys = self._allocate(keys, batch)  # [B, G, capacity, Q]
            self._values = self._allocate(values, batch)
        end = self.length + num_new
        assert end <= self.capacity, f"{self.length} + {num_new} tokens > capacity {self.capacity}"
        # the first rows are in use: those that ended have left
        all_keys, all_values = self._keys[:batch], self._values[:batch]
        slots = self._slots.positions(self.length, num_new, device=keys.device)
        if slots.ndim == 1:
            all_keys[:, :, self.length : end] = keys
            all_values[:, :, self.length : end] = values
        else:
            rows = torch.arange(batch, device=keys.device)[:, None]  # [B, 1]
            all_keys[rows, :, slots] = keys.transpose(1, 2)  # [B, T, G, Q] by the rules of advanced indexing
            all_values[rows, :, slots] = values.transpose(1, 2)
        self.length = end
        return all_keys[:, :, :end], all_values[:, :, :end]

    def mask(self, num_new: int, *, device: torch.device) -> Tensor | None:
        """Return where the last T tokens may attend: bool [T, L] or [B, 1, T, L]; None: everywhere.

        Also None for the first tokens of a cache, whose attention is causal.
        """
        return self._slots.mask(self.length - num_new, num_new, device=device)

    @property
    def num_values(self) -> int:
        """Number of keys and values that the memory has room for; 0 before the first `append`."""
        return sum(held.numel() for held in (self._keys, self._values) if held is not None)

    def keep(self, rows: Sequence[int]) -> None:
        """Make sequence i that of rows[i]; copies only those that move, if they come from behind the ones that stay."""
        if self._keys is None or self._values is None:  # of another pipeline stage
            return
        moves = [(to, row) for to, row in enumerate(rows) if to != row]
        if all(row >= len(rows) for _, row in moves):
            for to, row in moves:
                for held in (self._keys, self._values):
                    held[to, :, : self.length] = held[row, :, : self.length]
            return
        index = torch.tensor(rows, device=self._keys.device)
        self._keys, self._values = (self._spread(held, index) for held in (self._keys, self._values))

    def _allocate(self, like: Tensor, batch: int) -> Tensor:
        shape = batch, like.shape[1], self.capacity, like.shape[3]
        # unfilled slots are read if sequences have different lengths: they are masked, but 0 times NaN would be NaN
        return like.new_empty(shape) if self._slots.padding is None else like.new_zeros(shape)

    def _spread(self, held: Tensor, index: Tensor) -> Tensor:
        chosen = self._allocate(held, len(index))
        chosen[:, :, : self.length] = held[index, :, : self.length]
        return chosen


class KeyValueCache:
    """One `LayerCache` per layer; positions are implicit: token i of a sequence is at position i.

    Args:
        num_layers: Number of blocks of the model.
        capacity: Maximum number of tokens, including padding.
        padding: For sequences of different lengths: [B] number of padding tokens at the end of each row of the first
            forward pass, which later tokens overwrite. None: no padding.

    Attributes:
        selects_rows: Whether `keep` is supported.
    """

    selects_rows = True

    def __init__(self, *, num_layers: int, capacity: int, padding: Tensor | None = None) -> None:
        self._slots = Slots(padding)
        self.layers = [LayerCache(capacity=capacity, slots=self._slots) for _ in range(num_layers)]

    @property
    def padding(self) -> Tensor | None:
        """Number of slots of each sequence that are behind its newest token, [B]; None: none."""
        return self._slots.padding

    @property
    def length(self) -> int:
        """Tokens in the cache, including padding, before the next forward pass."""
        return max(layer.length for layer in self.layers)  # a pipeline stage fills only its own layers

    @property
    def num_values(self) -> int:
        """Number of keys and values that the memory of all layers has room for; 0 before the first forward pass."""
        return sum(layer.num_values for layer in self.layers)

    def count_values(self, num_tokens: int) -> int:
        """Return the values that a sequence of so many tokens takes, known from one that was read alone."""
        return self.num_values // self.layers[0].capacity * num_tokens

    def end(self, num_new: int) -> int:
        """Return the number of positions in use after T more tokens; with padding, 0 after the first forward pass."""
        return 0 if self.padding is not None and self.length else self.length + num_new

    def positions(self, num_new: int, *, device: torch.device) -> Tensor:
        """Return the positions of the next T tokens: [T], or [B, T] if they differ between sequences."""
        return self._slots.positions(self.length, num_new, device=device)

    def last(self, hidden: Tensor) -> Tensor:
        """Return the hidden state [B, 1, W] of the last token of each sequence, given those of new tokens [B, T, W]."""
        num_new = hidden.shape[1]
        if self.padding is None or num_new < self.length:
            return hidden[:, -1:]
        index = num_new - 1 - self.padding  # [B]
        return hidden[torch.arange(len(hidden), device=hidden.device), index][:, None]

    def keep(self, rows: Sequence[int]) -> None:
        """Make sequence i that of rows[i], which may be fewer, or several of the same."""
        for layer in self.layers:
            layer.keep(rows)
        padding = self.padding
        if padding is None:
            return
        padding = padding[torch.tensor(rows, device=padding.device)]
        unused, largest = int(padding.min()), int(padding.max())  # the longest sequence may have left
        for layer in self.layers:
            layer.length = max(0, layer.length - unused)
        self._slots.keep(padding - unused if largest > unused else None)

    def clear(self) -> None:
        """Remove all tokens but keep the memory."""
        for layer in self.layers:
            layer.length = 0
