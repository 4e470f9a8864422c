"""Copy tensors to host memory during the next forward and backward pass; only the optimizer step waits for it.

Needs host memory for the copied tensors, reused between copies. For tensors on a GPU it is pinned, and torch rounds
each pinned tensor up to a power of two: up to twice the size.
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
    """Copies of shards in host memory.

    Call `begin` on the training thread, `fill` on any other, and `wait` on the training thread before tensors change.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._sources: dict[str, Part] = {}
        self._host_copied = threading.Event()  # set once host tensors are copied
        self._host_copied.set()
        self._device_copied: torch.cuda.Event | None = None  # for tensors on the GPU
        self._device: torch.device | None = None  # device of that event
        self._stream: torch.cuda.Stream | None = None  # one for all copies: torch's pool of 32 streams is shared

    def begin(self, parts: Mapping[str, Part]) -> None:
        """Register the tensors to copy; clone at once those that may change before the next optimizer step."""
        self._sources = {
            name: part if part.constant else replace(part, tensor=part.tensor.clone()) for name, part in parts.items()
        }
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in parts}
        on_gpu = [name for name, part in self._sources.items() if part.tensor.is_cuda]
        self._device_copied = self._enqueue(on_gpu) if on_gpu else None
        self._host_copied.clear()

    def _enqueue(self, names: list[str]) -> torch.cuda.Event:
        """Start copies on a separate stream, after all work queued so far on the training stream."""
        self._device = self._sources[names[0]].tensor.device
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for name in names:
                tensor = self._sources[name].tensor
                self._buffer(name).copy_(tensor, non_blocking=True)
                # else the allocator may reuse a cloned buffer's memory while it is still being copied
                tensor.record_stream(stream)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(stream)
        return copied

    def fill(self) -> dict[str, Part]:
        """Finish the copy; return the shards in host memory, valid until the next copy overwrites them."""
        try:
            for name, part in self._sources.items():
                if not part.tensor.is_cuda:
                    _copy(self._buffer(name), part.tensor)
        finally:
            self._host_copied.set()  # also after an error, or the training thread would wait forever
        if self._device_copied is not None:
            with torch.cuda.device(self._device):  # a new thread defaults to the first GPU
                self._device_copied.synchronize()
        parts = {name: replace(part, tensor=self._buffers[name]) for name, part in self._sources.items()}
        self._sources = {}
        return parts

    def wait(self) -> None:
        """Return once tensors may change; for tensors on a GPU the stream waits, not the host."""
        if self._device_copied is not None:
            torch.cuda.current_stream().wait_event(self._device_copied)
        self._host_copied.wait()

    def _buffer(self, name: str) -> Tensor:
        tensor = self._sources[name].tensor
        buffer = self._buffers.get(name)  # None before the first copy
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy with numpy: torch would start its thread pool alongside the training threads."""
    if not source.is_contiguous():
        target.copy_(source)
    elif source.numel():
        np.copyto(_as_bytes(target), _as_bytes(source))


def _as_bytes(tensor: Tensor) -> Any:
    """View a tensor as bytes, since numpy has no bfloat16."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
