"""Offload saved activations to host memory, overlapped with computation, and prefetch them one block ahead.

GPU tensors are copied to pinned memory on a separate stream. The activations of a block leave device memory when the
next block is done, so at most two blocks' worth are on the device, in the forward and the backward pass. The last
block's activations stay, because the backward pass starts with it. On a CPU the same code copies synchronously.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from recipes.activation_checkpoint.entered import Entered
from recipes.numerics.nf4 import get_parts, is_nf4
from recipes.torch_internals import is_traceable_wrapper_subclass, tree_leaves

_Key = tuple[int, int]  # storage address, version of its content


def allocate_host(num_bytes: int, *, pinned: bool) -> Tensor:
    """Allocate [num_bytes] uint8 in host memory, cached by torch; pinned memory is rounded up to a power of two."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


class HostOffload:
    """Moves the saved activations of a chain of blocks to host memory and back.

    Args:
        min_bytes: Smaller storages stay on the device: starting a copy takes microseconds.

    Attributes:
        active: The block call that is saving tensors; None outside blocks.
    """

    def __init__(self, *, min_bytes: int) -> None:
        self._min_bytes = max(min_bytes, 1)
        self._stream: torch.cuda.Stream | None = None  # for both directions: a copy back follows the copy out
        self._copies: weakref.WeakValueDictionary[_Key, _Copy] = weakref.WeakValueDictionary()
        self.active: _Call | None = None
        self._last: weakref.ref[_Call] | None = None
        self._leaving: _Call | None = None  # call whose device tensors are held until they have been copied

    def saving(self, *, is_first: bool, is_last: bool) -> Entered:
        """Return the context manager to enter around each call of a block.

        Args:
            is_first: Whether the block starts the forward pass of a micro-batch.
            is_last: Whether the backward pass starts with this block.
        """

        owners: list[nn.Module] = []  # modules that own parameters or buffers

        @contextlib.contextmanager
        def enter(block: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Iterator[None]:
            if not owners:
                owners.extend(module for module in block.modules() if module._parameters or module._buffers)
            previous = None if is_first else self._last
            call = _Call(self, owners, tree_leaves((inputs, options)), previous=previous, keeps=is_last)
            self.active = call
            try:
                with saved_tensors_hooks(call.pack, unpack):
                    yield
            finally:
                self.active = None
            if self._leaving is not None:
                self._leaving.release()
            self._leaving, self._last = call, weakref.ref(call)
            if is_last:  # none of its tensors are offloaded
                self._leaving = None

        return enter

    def copy(self, tensor: Tensor) -> "_Copy":
        """Return the host copy of a tensor's storage, starting it unless the same values have already been copied."""
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        copy = self._copies.get(key)
        if copy is None or copy.storage() is not storage:  # a different storage had the same address
            copy = self._copies[key] = _Copy(tensor, self)
        return copy

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a plain tensor and large enough to offload."""
        if tensor.layout != torch.strided or tensor.is_complex() or is_traceable_wrapper_subclass(tensor):
            return False
        num_bytes = tensor.untyped_storage().nbytes()
        return num_bytes >= self._min_bytes and num_bytes % tensor.element_size() == 0

    def transfer(self, target: Tensor, source: Tensor) -> "torch.cuda.Event | None":
        """Copy between host and device after all queued work; return the completion event, or None if synchronous."""
        if not (target.is_cuda or source.is_cuda):
            target.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(self._stream)
        return done


class _Copy:
    """A storage copied to host memory; also on the device until `release`, and again after `fetch`.

    The compute stream owns both device buffers and waits for the copy before they are freed. They therefore need no
    `record_stream`, which would make the time at which the memory becomes reusable unpredictable.
    """

    def __init__(self, tensor: Tensor, offload: HostOffload) -> None:
        storage = tensor.untyped_storage()
        self.storage = weakref.ref(storage)
        self._offload = offload
        self._source: Tensor | None = tensor.detach()  # shares the version counter of in-place changes
        self._version = tensor._version
        self._fetched: Tensor | None = None  # [bytes of the storage]
        self._device = tensor.device
        self._host = allocate_host(storage.nbytes(), pinned=tensor.is_cuda)  # [bytes of the storage]
        self._done = offload.transfer(self._host, _bytes_of(self._source))

    def release(self) -> None:
        """Free the device tensor, in stream order after its copy.

        Raises:
            RuntimeError: The values were changed in place during the copy; autograd checks this only without hooks.
        """
        self._wait()
        if self._source is not None and self._source._version != self._version:
            raise RuntimeError("a tensor that a block had saved for the backward pass was changed in place afterwards")
        self._source = None

    def fetch(self) -> None:
        """Start copying back to the device, unless the tensor is already there."""
        if self._source is None and self._fetched is None:
            fetched = torch.empty_like(self._host, device=self._device, pin_memory=False)
            self._fetched = fetched
            self._done = self._offload.transfer(fetched, self._host)

    def view(self, like: "Saved") -> Tensor:
        """Return the saved tensor; the stream waits for the copy, the host does not."""
        self.fetch()
        with torch.no_grad():
            if self._source is not None:
                held = _bytes_of(self._source)
            else:
                self._wait()
                assert self._fetched is not None
                held = self._fetched
            return held.view(like.dtype).as_strided(like.shape, like.stride, like.offset)

    def _wait(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
            self._done = None

    def __del__(self) -> None:
        # after an aborted backward pass, the allocator must not reuse memory that a copy is still writing to
        with contextlib.suppress(Exception):
            self._wait()


class _Call:
    """One call of a block: its saved tensors, and the previous call, whose backward pass comes next."""

    def __init__(
        self,
        offload: HostOffload,
        owners: Sequence[nn.Module],
        inputs: Iterable[Any],
        *,
        previous: "weakref.ref[_Call] | None",
        keeps: bool,
    ) -> None:
        tensors = list(_find_tensors(inputs))
        self._offload = offload
        self._owners = owners
        self._device = tensors[0].device if tensors else None
        # inputs without a gradient, such as masks and rotary tables, are shared by all blocks
        self._shared = {_address(tensor) for tensor in tensors if not tensor.requires_grad}
        self._previous = previous
        self._keeps = keeps
        self._copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()  # by id, in saving order
        self._leaving: list[_Copy] = []
        self._is_backward = False

    def pack(self, tensor: Tensor) -> "Saved | Kept":
        """Start copying a tensor to host memory, unless it stays on the device."""
        if self._keeps or not self._offload.takes(tensor) or tensor.device != self._device:
            return Kept(self, tensor)
        address = _address(tensor)
        if address in self._shared or address in self._state():
            return Kept(self, tensor)
        with torch.no_grad():
            copy = self._offload.copy(tensor)
        if id(copy) not in self._copies:
            self._copies[id(copy)] = copy
            self._leaving.append(copy)
        return Saved(self, copy, tensor)

    def release(self) -> None:
        """Release the device memory of copied tensors."""
        for copy in self._leaving:
            copy.release()
        self._leaving.clear()

    def fetch(self) -> None:
        """Start copying back the tensors still needed; the last saved comes first because it is needed first."""
        with torch.no_grad():
            for copy in reversed(list(self._copies.values())):
                copy.fetch()

    def begin_backward(self) -> None:
        """Fetch this block's tensors for its backward pass, then prefetch those of the previous block."""
        if self._is_backward:
            return
        self._is_backward = True
        self.fetch()
        previous = self._previous() if self._previous is not None else None
        if previous is not None:
            previous.fetch()

    def _state(self) -> set[int]:
        """Return the current addresses of parameters and buffers; under FSDP2, unsharded ones during a block's call."""
        return {
            _address(part)
            for module in self._owners
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
            for part in (get_parts(tensor) if is_nf4(tensor) else [tensor])
            if not is_traceable_wrapper_subclass(part)
        }


class Kept:
    """A saved tensor that stays on the device."""

    __slots__ = ("call", "tensor")

    def __init__(self, call: _Call, tensor: Tensor) -> None:
        self.call, self.tensor = call, tensor


class Saved:
    """A saved tensor as a view of a copied storage."""

    __slots__ = ("call", "copy", "dtype", "offset", "shape", "stride")

    def __init__(self, call: _Call, copy: _Copy, tensor: Tensor) -> None:
        self.call, self.copy, self.dtype = call, copy, tensor.dtype
        self.offset, self.shape, self.stride = tensor.storage_offset(), tensor.shape, tensor.stride()


def unpack(saved: Saved | Kept) -> Tensor:
    """Return a packed tensor, and mark the start of its block's backward pass."""
    saved.call.begin_backward()
    return saved.tensor if isinstance(saved, Kept) else saved.copy.view(saved)


def _find_tensors(leaves: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among a block's arguments, including those inside objects such as a `Rotation`."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield leaf
        else:
            yield from (value for value in getattr(leaf, "__dict__", {}).values() if isinstance(value, Tensor))


def _address(tensor: Tensor) -> int:
    """Return an identifier of a plain tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's entire storage as uint8, [bytes of the storage]."""
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    # not `set_`: the fake tensor cache would keep the storage alive, and mode=plan would count it
    return tensor.as_strided((num_elements,), (1,), 0).view(torch.uint8)
