"""What a model reads while it generates: with a key-value cache one token per row, without it the whole rows.

Shapes: B rows, P prompts, T tokens of the longest prompt, V vocabulary with padding, M `max_seq_len`, N images of a row
of C channels and S pixels a side.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recipes.model import KeyValueCache, LanguageModel


class Window:
    """The tokens of a batch of rows that the model sees, at most M each.

    A window that slides is recomputed from its newest half whenever it is full, one forward pass of M / 2 tokens every
    M / 2 tokens: positions are absolute (learned, or rotated keys in the cache). All of its rows have the same length,
    so they slide together.

    Args:
        model: Model on any device.
        prompts: At least one token each, and at most M.
        num_tokens: Number of tokens that may be read after the prompts.
        slides: Whether a full window slides; otherwise nothing is read after M tokens.
        use_cache: False reads whole rows for every token.
        images: [N, C, S, S] of each prompt; None: the prompts have none.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        *,
        num_tokens: int,
        slides: bool,
        use_cache: bool,
        images: Sequence[Tensor] | None,
    ) -> None:
        self._model = model
        self._device = next(iter(model.parameters())).device
        self._slides = slides
        self._never: int | None = model.image_token_id if takes_images(model) else None  # type: ignore[attr-defined]
        self._images = None if images is None else [each.to(self._device) for each in images]
        self._use_cache = use_cache and takes_cache(model)
        self._lengths = [len(prompt) for prompt in prompts]
        width = max(self._lengths)
        self._capacity = min(width + num_tokens, model.max_seq_len) if slides else width + num_tokens
        self._prompts = pad_right(prompts, device=self._device)  # [B, T]
        self._held: Tensor | None = None  # [B, capacity], the tokens of all rows, where they are read again
        if slides or not self._use_cache:
            self._held = self._prompts.new_zeros(len(prompts), self._capacity)
            self._held[:, :width] = self._prompts
        self._cache: Any = None
        if self._use_cache:
            self._cache = make_cache(model, capacity=self._capacity, padding=self._padding())
        self.selects_rows = not self._use_cache or bool(getattr(self._cache, "selects_rows", False))

    def start(self) -> Tensor:
        """Read the prompts and return the logits of the next tokens, [B, V]."""
        return (
            self._read_held(self._prompts) if self._cache is None else self._run(self._prompts, **self._read_images())
        )

    def read(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, [B], and return the logits of the next ones, [B, V]."""
        tokens = tokens.clamp(min=0)  # a row without a token has ended
        if self._slides and self._lengths[0] == self._model.max_seq_len:
            assert self._held is not None, "a window that slides holds its tokens"
            kept = max(1, self._model.max_seq_len // 2)
            newest = torch.cat([self._held, tokens[:, None]], dim=1)[:, -kept:]  # [B, M / 2]
            self._held[:, :kept] = newest
            self._lengths = [kept] * len(tokens)
            if self._cache is not None:
                self._cache.clear()
                return self._run(newest)
            return self._read_held(newest)
        if self._held is not None:
            rows = torch.arange(len(tokens), device=self._device)
            self._held[rows, torch.tensor(self._lengths, device=self._device)] = tokens
        self._lengths = [length + 1 for length in self._lengths]
        if self._cache is not None:
            return self._run(tokens[:, None])
        assert self._held is not None, "whole rows are read"
        return self._read_held(self._held[:, : max(self._lengths)])

    def keep(self, rows: Sequence[int]) -> None:
        """Make row i that of rows[i], which may be fewer, or several of the same."""
        assert self.selects_rows, "the cache of this model cannot select rows"
        self._lengths = [self._lengths[row] for row in rows]
        if self._held is not None:
            self._held = self._held[torch.tensor(rows, device=self._device)]
        if self._images is not None:
            self._images = [self._images[row] for row in rows]
        if self._cache is not None:
            self._cache.keep(rows)

    def run_idle(self) -> None:
        """Take part in a forward pass of the other ranks, without a row of one's own."""
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        if self._use_cache:
            cache = make_cache(self._model, capacity=1, padding=None)
            if takes_images(self._model):
                cache.has_prompt = True  # the other ranks have read their images, and do not run the tower either
            self._model(tokens, cache=cache)
        else:
            self._model(tokens)

    def _run(self, tokens: Tensor, **images: Tensor) -> Tensor:
        logits: Tensor = self._model(tokens, cache=self._cache, **images)
        return self._forbid(logits[:, -1])

    def _read_held(self, tokens: Tensor) -> Tensor:
        # [B, T, V]: tokens after the end of a row change nothing before it
        logits = self._model(tokens, **self._read_images())
        last = torch.tensor(self._lengths, device=self._device) - 1
        return self._forbid(logits[torch.arange(len(tokens), device=self._device), last])

    def _forbid(self, logits: Tensor) -> Tensor:
        """Return logits [B, V] with which no token of an image is generated: there would be no image for it."""
        if self._never is not None:
            logits[:, self._never] = float("-inf")
        return logits

    def _read_images(self) -> dict[str, Tensor]:
        """Return the images of all rows as an argument of the model, [B N, C, S, S]; none where there is none."""
        images = None if self._images is None else torch.cat(self._images)
        return {} if images is None or not len(images) else {"images": images}

    def _padding(self) -> Tensor | None:
        """Return the number of padding tokens at the end of each prompt, [B]; None: they are of one length."""
        if len(set(self._lengths)) == 1:
            return None
        return torch.tensor([max(self._lengths) - length for length in self._lengths], device=self._device)


def takes_cache(model: LanguageModel) -> bool:
    """Return whether a model can read one token at a time."""
    return "cache" in inspect.signature(model.forward).parameters


def takes_images(model: LanguageModel) -> bool:
    """Return whether a model reads images among tokens."""
    return "images" in inspect.signature(model.forward).parameters


def make_cache(model: LanguageModel, *, capacity: int, padding: Tensor | None) -> Any:
    """Return an empty cache: from the model's `make_cache` if it has one, otherwise a `KeyValueCache`."""
    if hasattr(model, "make_cache"):
        return model.make_cache(capacity=capacity, padding=padding)
    num_layers = int(getattr(model, "num_layers", len(model.blocks)))  # a pipeline rank has only some of the blocks
    return KeyValueCache(num_layers=num_layers, capacity=capacity, padding=padding)


def pad_right(prompts: Sequence[Sequence[int]], *, device: torch.device) -> Tensor:
    """Return the prompts as one tensor [B, T], with zeros after each."""
    width = max(map(len, prompts))
    return torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
