"""A copy of tensors in host memory, made while the next forward and backward pass run: the step waits, not the run.

Costs host memory of the size of what is copied, kept from one copy to the next; pinned where the tensors are on a GPU,
where torch rounds each tensor up to a power of two: up to twice the size.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.checkpoint.shard_file import Part


class HostStaging:
    """Copies of parts. `begin` on the thread that trains, `fill` on any other, `wait` before tensors change."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._sources: dict[str, Part] = {}
        self._on_host = threading.Event()  # what lies in host memory is copied
        self._on_host.set()
        self._on_device: torch.cuda.Event | None = None
        self._device: torch.device | None = None  # of that event

    def begin(self, parts: Mapping[str, Part]) -> None:
        """Note what to copy; what may change before the next optimizer step is set aside at once."""
        self._sources = {
            name: part if part.constant else replace(part, tensor=part.tensor.clone())
            for name, part in parts.items()
        }
        self._buffers = {name: b for name, b in self._buffers.items() if name in parts}
        on_gpu = [name for name, part in self._sources.items() if part.tensor.is_cuda]
        self._on_device = self._enqueue(on_gpu) if on_gpu else None
        self._on_host.clear()

    def _enqueue(self, names: list[str]) -> torch.cuda.Event:
        """On a stream beside the one that trains, after what it has been given so far."""
        self._device = self._sources[names[0]].tensor.device
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for name in names:
                tensor = self._sources[name].tensor
                self._buffer(name).copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(stream)
        return done

    def fill(self) -> dict[str, Part]:
        """Finish the copy; the parts, in host memory. They are overwritten by the copy after this one."""
        try:
            for name, part in self._sources.items():
                if not part.tensor.is_cuda:
                    _copy(self._buffer(name), part.tensor)
        finally:
            self._on_host.set()
        if self._on_device is not None:
            with torch.cuda.device(self._device):  # a thread's own is the first GPU
                self._on_device.synchronize()
        parts = {
            name: replace(part, tensor=self._buffers[name]) for name, part in self._sources.items()
        }
        self._sources = {}
        return parts

    def wait(self) -> None:
        """Let nothing change the tensors before they are copied. For those on a GPU only the GPU waits."""
        if self._on_device is not None:
            torch.cuda.current_stream().wait_event(self._on_device)
        self._on_host.wait()

    def _buffer(self, name: str) -> Tensor:
        tensor = self._sources[name].tensor
        have = self._buffers.get(name)  # none at the first copy
        if have is None or have.shape != tensor.shape or have.dtype != tensor.dtype:
            pinned = tensor.is_cuda
            have = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[name] = have
        return have


def _copy(target: Tensor, source: Tensor) -> None:
    """By numpy: torch would start its threads beside those that train. bfloat16 travels as bits."""
    if not source.is_contiguous():
        target.copy_(source)
    elif source.numel():
        np.copyto(_bits(target), _bits(source))


def _bits(tensor: Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
