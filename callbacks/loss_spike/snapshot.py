"""Copies of a run's tensors in host memory, to go back to. Costs their size in memory and one copy each time.

On a GPU the copy runs on a stream of its own, beside the next forward and backward pass, into pinned memory.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EARLY = "buffer/"  # names of what the next forward pass changes: set aside at once
Named = Iterable[tuple[str, Tensor]]


class Snapshot:
    """One copy. Its buffers are kept and filled again by the next one.

    Args:
        folder: Where the buffers are files, mapped into memory; None: in memory.

    Attributes:
        step: Optimizer steps completed in it; None: it is empty.
        taken_at: The same on a clock that a rollback does not turn back.
        numbers: What is not a tensor.
        seconds: That training waited for it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.step: int | None = None
        self.taken_at = 0
        self.numbers: dict[str, Any] = {}
        self._folder = folder
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @torch.no_grad()
    def take(self, tensors: Named) -> None:
        """Copy tensors. Those on a GPU may be read until `wait`: call it before they change.

        Args:
            tensors: By name, each once; valid until the next one is asked for where they are not on a GPU.
        """
        self.step = None  # until it is whole
        stream: Any = None
        for name, tensor in tensors:
            tensor = tensor.detach()
            if tensor.is_cuda and stream is None:
                stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
            if tensor.is_cuda and name.startswith(EARLY):
                tensor = tensor.clone()
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
            buffer = self._buffer(name, tensor)
            if tensor.is_cuda:
                with torch.cuda.stream(stream):
                    buffer.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
            else:
                buffer.copy_(tensor)
        if stream is not None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(stream)

    def wait(self) -> None:
        """Let nothing change the tensors before they are copied; the GPU waits, the host does not."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    @torch.no_grad()
    def put_back(self, tensors: Named) -> list[str]:
        """Copy the buffers into tensors of the same names.

        Returns:
            Names of tensors that were not there when the snapshot was taken; they are left as they are.
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
        """Give the memory back."""
        self.step, self.numbers, self._buffers, self._copied = None, {}, {}, None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        have = self._buffers.get(name)
        if have is None or have.shape != tensor.shape or have.dtype != tensor.dtype:
            have = self._new_buffer(len(self._buffers), tensor)
            self._buffers[name] = have
        return have

    def _new_buffer(self, number: int, tensor: Tensor) -> Tensor:
        if self._folder is None or tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._folder.mkdir(parents=True, exist_ok=True)
        flat = torch.from_file(
            str(self._folder / f"{number}.bin"),
            shared=True,
            size=tensor.numel(),
            dtype=tensor.dtype,
        )
        return flat.view(tensor.shape)


class SnapshotRing:
    """The newest few snapshots; one is good after so many steps without an alarm.

    Args:
        size: How many are kept.
        quarantine_steps: Steps after which a snapshot may be gone back to.
        folder: Where they are files; None: in memory.

    Raises:
        ValueError: With less than two, the one that is good is overwritten by one that is not yet.
    """

    def __init__(self, *, size: int, quarantine_steps: int, folder: Path | None = None) -> None:
        if size < 2:
            raise ValueError(
                f"a ring of {size} snapshots: the good one would be overwritten by a new one"
            )
        self.quarantine_steps = quarantine_steps
        self._slots = [
            Snapshot(None if folder is None else folder / str(number)) for number in range(size)
        ]

    @property
    def held(self) -> list[Snapshot]:
        """Oldest first."""
        held = [one for one in self._slots if one.step is not None]
        return sorted(held, key=lambda one: one.taken_at)

    def oldest(self) -> Snapshot:
        """The one to overwrite: an empty one, or the oldest."""
        empty = [one for one in self._slots if one.step is None]
        return empty[0] if empty else self.held[0]

    def good(self, now: int) -> Snapshot | None:
        """The newest that is out of quarantine.

        Args:
            now: On the clock of `Snapshot.taken_at`.
        """
        good = [one for one in self.held if now - one.taken_at >= self.quarantine_steps]
        return good[-1] if good else None

    def forget_after(self, snapshot: Snapshot) -> None:
        """Drop those that are newer: they hold what a rollback undoes. Their memory is kept for the next ones."""
        for one in self.held:
            if one.taken_at > snapshot.taken_at:
                one.step = None

    def wait(self) -> None:
        """Before tensors change."""
        for one in self._slots:
            one.wait()

    def drop(self) -> None:
        """Give the memory back."""
        for one in self._slots:
            one.drop()
