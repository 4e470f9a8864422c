"""Snapshots of a run's tensors in host memory or in files, for rollbacks; each costs one copy of the tensors.

On a GPU the copy to pinned memory runs on its own stream, overlapping the next forward and backward pass.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import reserve

EARLY = "buffer/"  # prefix of tensors changed by the next forward pass, which are cloned on the device first
Named = Iterable[tuple[str, Tensor]]


class CopyStream:
    """One lazily created CUDA stream for all copies to the host: torch's pool has only 32 streams."""

    def __init__(self) -> None:
        self._stream: Any = None

    def get(self, device: torch.device) -> Any:
        """Return the stream, made to wait for all work queued so far on the current stream.

        Args:
            device: Device of the tensors to copy; the same at every call.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream


class Snapshot:
    """One copy of the train state, whose buffers are reused when it is taken again.

    Args:
        folder: Folder for memory-mapped buffer files; None keeps the buffers in memory.
        copy_stream: Stream shared with other snapshots; None creates a new one.

    Attributes:
        step: Optimizer steps completed in this state; None while the snapshot is empty.
        taken_at: Clock value when it was taken; the clock does not decrease on a rollback.
        scalars: The part of the state that is not in tensors.
    """

    def __init__(self, folder: Path | None = None, copy_stream: CopyStream | None = None) -> None:
        self.step: int | None = None
        self.taken_at = 0
        self.scalars: dict[str, Any] = {}
        self._folder = folder
        self._copy_stream = CopyStream() if copy_stream is None else copy_stream
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Size of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @torch.no_grad()
    def take(self, tensors: Named) -> None:
        """Copy tensors into the buffers; on a GPU the copy is asynchronous: call `wait` before the tensors change.

        Args:
            tensors: Pairs of unique name and tensor. A CPU tensor must only stay valid until the next one is yielded.

        Raises:
            OSError: The disk has no space for the files; the snapshot is empty.
        """
        self.step = None  # empty until the caller sets the step
        stream: Any = None
        for name, tensor in tensors:
            tensor = tensor.detach()
            if tensor.is_cuda and stream is None:
                stream = self._copy_stream.get(tensor.device)
            if tensor.is_cuda and name.startswith(EARLY):
                tensor = tensor.clone()  # same shape
                self._copy_stream.get(tensor.device)  # wait for the clone
            buffer = self._buffer(name, tensor)
            if tensor.is_cuda:
                with torch.cuda.stream(stream):
                    buffer.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
            else:
                buffer.copy_(tensor)
        if stream is not None:
            self._copied = torch.cuda.Event()
            self._copied.record(stream)

    def wait(self) -> None:
        """Make the GPU, but not the host, wait for the copy; call it before the tensors change."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    @torch.no_grad()
    def restore(self, tensors: Named) -> list[str]:
        """Copy the buffers into the tensors with the same names.

        Returns:
            Names of tensors that did not exist when the snapshot was taken; these are left unchanged.
        """
        if self._copied is not None:
            self._copied.synchronize()
        new = []
        for name, tensor in tensors:
            if name in self._buffers:
                tensor.detach().copy_(self._buffers[name])
            else:
                new.append(name)
        return new

    def drop(self) -> None:
        """Free the memory and delete any files."""
        self.step, self.scalars, self._buffers, self._copied = None, {}, {}, None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._new_buffer(len(self._buffers), tensor)
            self._buffers[name] = buffer
        return buffer

    def _new_buffer(self, number: int, tensor: Tensor) -> Tensor:
        if self._folder is None or tensor.numel() == 0:
            # same shape as `tensor`; a non-blocking copy from a GPU needs pinned memory
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{number}.bin"
        reserve(path, tensor.nbytes)
        flat = torch.from_file(  # [number of elements]
            str(path),
            shared=True,
            size=tensor.numel(),
            dtype=tensor.dtype,
        )
        return flat.view(tensor.shape)


class SnapshotRing:
    """A ring of the newest snapshots; each is good once its quarantine is over.

    Args:
        size: Snapshots held, at least two.
        quarantine_steps: Optimizer steps after which a snapshot may be restored.
        folder: Folder to store them in as files; None keeps them in memory.

    Raises:
        ValueError: `size` is below two: a new snapshot would overwrite the good one.
    """

    def __init__(self, *, size: int, quarantine_steps: int, folder: Path | None = None) -> None:
        if size < 2:
            raise ValueError(f"a ring of {size} snapshots: the good one would be overwritten by a new one")
        self.quarantine_steps = quarantine_steps
        folders = [None if folder is None else folder / str(number) for number in range(size)]
        copy_stream = CopyStream()
        self._slots = [Snapshot(folder, copy_stream) for folder in folders]

    @property
    def held(self) -> list[Snapshot]:
        """Snapshots that are not empty, oldest first."""
        held = [snapshot for snapshot in self._slots if snapshot.step is not None]
        return sorted(held, key=lambda snapshot: snapshot.taken_at)

    def oldest(self) -> Snapshot:
        """Return the snapshot to overwrite next: an empty one if any, else the oldest."""
        empty = [snapshot for snapshot in self._slots if snapshot.step is None]
        return empty[0] if empty else self.held[0]

    def good(self, now: int) -> Snapshot | None:
        """Return the newest snapshot out of quarantine; None if there is none.

        Args:
            now: Current value of the clock used for `Snapshot.taken_at`.
        """
        good = [snapshot for snapshot in self.held if now - snapshot.taken_at >= self.quarantine_steps]
        return good[-1] if good else None

    def drop_after(self, snapshot: Snapshot) -> None:
        """Mark newer snapshots as empty after a rollback; their memory is reused."""
        for newer in self.held:
            if newer.taken_at > snapshot.taken_at:
                newer.step = None

    def wait(self) -> None:
        """Wait for all copies; call it before the tensors change. See `Snapshot.wait`."""
        for snapshot in self._slots:
            snapshot.wait()

    def drop(self) -> None:
        """Free all snapshots."""
        for snapshot in self._slots:
            snapshot.drop()
