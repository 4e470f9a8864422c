"""Undo what the forward passes of a skipped step have done to buffers, such as NaN in the statistics of batch norm."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_SMALL = 2**16  # elements up to which a buffer is always copied: statistics, counters, tables of positions


class _Place(NamedTuple):
    """A buffer and where its module keeps it: a forward pass may write into it or assign another tensor."""

    name: str
    owner: nn.Module
    key: str
    buffer: Tensor

    def current(self) -> Tensor | None:
        return self.owner._buffers.get(self.key)


class ForwardBuffers:
    """Copies, before each step, the buffers that forward passes change.

    A large buffer may be a moving average of the weights, a queue of features or a codebook. To copy one that no
    forward pass changes would double its memory and cost time in every step. So a large buffer is copied from the step
    on that follows its first change by a forward pass; that one change is not undone. Changes are seen by the version
    counter, and in the first step, for those through `.data`, which leave the counter as it is, by the sum.

    Changes by hooks after the forward pass, as of moving averages, are not undone: the weights they read are intact.
    """

    def __init__(self) -> None:
        self.copied: list[tuple[_Place, Tensor]] = []  # with the values before the step
        self._changing: set[str] = set()  # names of large buffers that forward passes change
        self._watched: list[_Place] = []  # the other large ones
        self._versions: list[int] = []  # of `_watched` before the forward pass; empty after it
        self._sums: list[float] = []  # of `_watched` before the first step; empty after it
        self._is_first = True
        self._is_in_step = False

    @torch.no_grad()
    def begin_batch(self, module: nn.Module) -> None:
        """Prepare for a forward pass; before the first of a step, copy the buffers."""
        if not self._is_in_step:
            self._is_in_step, self._watched = True, []
            for place in _find(module):
                if _is_large(place.buffer) and place.name not in self._changing:
                    self._watched.append(place)
                else:
                    self.copied.append((place, place.buffer.clone()))
            self._sums = [_sum(place.buffer) for place in self._watched] if self._is_first else []
        self._versions = [place.buffer._version for place in self._watched]

    @torch.no_grad()
    def end_forward(self) -> None:
        """Note which large buffers the forward pass has changed; only the first call after `begin_batch` counts."""
        versions, self._versions = self._versions, []
        for place, version in zip(self._watched, versions, strict=bool(versions)):
            if place.buffer._version != version or place.current() is not place.buffer:
                self._changing.add(place.name)
        sums, self._sums = self._sums, []  # of the first step alone: each reads the device
        for place, before in zip(self._watched, sums, strict=bool(sums)):
            now = _sum(place.buffer)
            if now != before and not (math.isnan(now) and math.isnan(before)):
                self._changing.add(place.name)

    @torch.no_grad()
    def end_step(self, skipped: Tensor | None) -> None:
        """Restore the copied buffers after a skipped step, and drop the copies.

        Args:
            skipped: A 0-dim bool tensor, not read on the host if it is on a GPU; None if there was no step.
        """
        copied, self.copied = self.copied, []
        self._is_in_step = self._is_first = False
        if skipped is None or not copied or (not skipped.is_cuda and not bool(skipped)):
            return
        for place, before in copied:
            now = place.current()
            if now is not None and now.shape == before.shape and now.dtype == before.dtype:
                now.copy_(torch.where(skipped.to(now.device), before.to(now.device), now))


def _find(module: nn.Module) -> Iterator[_Place]:
    """Yield all buffers once, except lazy and sparse ones and those with shared memory (`expand`)."""
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is None or id(buffer) in seen or is_lazy(buffer) or buffer.layout != torch.strided:
                continue
            seen.add(id(buffer))
            if not any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)):
                yield _Place(f"{prefix}.{key}", owner, key, buffer)


def _is_large(buffer: Tensor) -> bool:
    """Return whether a buffer is worth asking whether it changes, and can be asked."""
    return buffer.numel() > _SMALL and type(buffer) is Tensor and not buffer.is_inference()


def _sum(buffer: Tensor) -> float:
    """Return the sum of real numbers, which hardly any change leaves as it is; 0 for other types."""
    if buffer.dtype in (torch.float16, torch.bfloat16):
        return float(buffer.sum(dtype=torch.float32))
    # in its own precision: torch 2.13 would convert a copy
    return float(buffer.sum()) if buffer.dtype in (torch.float32, torch.float64) else 0.0
