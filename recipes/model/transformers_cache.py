"""What a model of `transformers` has read: its own cache, filled as `kv_cache.KeyValueCache` is.

Shapes: B sequences, T new tokens, W hidden size, V vocabulary.
"""

import inspect
from typing import Any

import torch
from torch import Tensor


class TransformersCache:
    """Keys and values of sequences that a model of `transformers` has read; as `kv_cache.KeyValueCache`.

    What pads the end of a prompt is moved to its beginning and masked.

    Args:
        config: Of the model, whose layers may keep other things than keys and values.
        gives_hidden: Whether `run` returns hidden states, for a head, or logits.
        padding: Tokens [B] at the end of each row of the first forward pass that are no part of it; None: none.
    """

    def __init__(self, config: Any, *, gives_hidden: bool, padding: Tensor | None) -> None:
        self._config = config
        self.padding = padding
        self._gives_hidden = gives_hidden
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        from transformers import DynamicCache

        self.length = 0
        self._cache = DynamicCache(config=self._config)
        self._mask: Tensor | None = None  # [B, tokens held]

    def run(self, inner: Any, tokens: Tensor) -> Tensor:
        """Return hidden states [B, 1, W] or logits [B, 1, V] of the last token of each sequence."""
        num_new = tokens.shape[1]
        positions = torch.arange(self.length, self.length + num_new, device=tokens.device)[None]  # [1, T]
        is_read = torch.ones_like(tokens)  # [B, T]
        if self.padding is not None:
            positions = positions - self.padding[:, None]  # [B, T]
            if self.length == 0:  # to the front, so that neighbours in a window of attention are neighbours here
                is_read = (positions >= 0).long()
                tokens = tokens.gather(1, positions.clamp(min=0))
            positions = positions.clamp(min=0)
        self._mask = is_read if self._mask is None else torch.cat([self._mask, is_read], dim=1)
        model = inner.base_model if self._gives_hidden else inner
        # of a prompt only the last logits are needed
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        out = model(
            input_ids=tokens,
            position_ids=positions.expand(len(tokens), -1),
            attention_mask=None if self.padding is None else self._mask,
            past_key_values=self._cache,
            use_cache=True,
            **last,
        )
        self.length += num_new
        values: Tensor = out.last_hidden_state if self._gives_hidden else out.logits  # [B, T, W or V]
        return values[:, -1:]
