"""Offload saved activations to host memory, overlapped with computation, and prefetch them one block ahead.

GPU tensors are copied to pinned memory on a separate stream. Device memory: the activations of a block are freed when
the next block is done, so two blocks' worth at a time, in the forward and in the backward pass. Those of the last block
stay, because the backward pass starts with it. On a CPU the same code copies synchronously.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from recipes.activation_checkpoint.entered import Entered
from recipes.numerics.nf4 import get_parts, is_nf4

_Key = tuple[int, int]  # storage, version of its content


def allocate_host(num_bytes: int, *, pinned: bool) -> Tensor:
    """Return [num_bytes] uint8 in host memory, which torch reuses; pinned memory it rounds up to a power of two."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


class HostOffload:
    """Moves the saved activations of a chain of blocks to host memory and back.

    Args:
        min_bytes: Smaller storages stay on the device: a copy takes some microseconds to start.

    Attributes:
        active: The call that saves tensors now; None outside of blocks.
    """

    def __init__(self, *, min_bytes: int) -> None:
        self._min_bytes = max(min_bytes, 1)
        self._stream: torch.cuda.Stream | None = None  # one for both directions: what comes back has left before
        self._copies: weakref.WeakValueDictionary[_Key, _Copy] = weakref.WeakValueDictionary()
        self.active: _Call | None = None
        self._last: weakref.ref[_Call] | None = None
        self._leaving: _Call | None = None  # the call whose tensors are held until they are copied

    def saving(self, *, is_first: bool, is_last: bool) -> Entered:
        """Return the context to enter around each call of a block.

        Args:
            is_first: Whether the block starts the forward pass of a micro-batch.
            is_last: Whether the backward pass starts with this block.
        """

        owners: list[nn.Module] = []  # of parameters and buffers

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
            if is_last:  # nothing of it leaves
                self._leaving = None

        return enter

    def copy(self, tensor: Tensor) -> "_Copy":
        """Return the host copy of a tensor's storage, starting it unless the same values were already copied."""
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        copy = self._copies.get(key)
        if copy is None or copy.storage() is not storage:  # else another one was at the same address
            copy = self._copies[key] = _Copy(tensor, self)
        return copy

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor is large enough and plain."""
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
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return done


class _Copy:
    """A storage in host memory; on the device until it is released, and again once it is fetched.

    Both are memory of the computing stream, and freed after that stream was made to wait for the copy. So they need no
    `record_stream`, under which the memory would be free again at a time that nobody can predict.
    """

    def __init__(self, tensor: Tensor, offload: HostOffload) -> None:
        storage = tensor.untyped_storage()
        self.storage = weakref.ref(storage)
        self._offload = offload
        self._source: Tensor | None = tensor.detach()  # shares the count of in-place changes
        self._version = tensor._version
        self._fetched: Tensor | None = None  # [bytes of the storage]
        self._device = tensor.device
        self._host = allocate_host(storage.nbytes(), pinned=tensor.is_cuda)  # [bytes of the storage]
        self._done = offload.transfer(self._host, _bytes_of(self._source))

    def release(self) -> None:
        """Let the device's memory go, as far as the computation behind it is concerned once it is copied.

        Raises:
            RuntimeError: The values were changed in place while they were copied; without hooks, autograd would say so.
        """
        self._wait()
        if self._source is not None and self._source._version != self._version:
            raise RuntimeError("a tensor that a block had saved for the backward pass was changed in place afterwards")
        self._source = None

    def fetch(self) -> None:
        """Begin to copy back, unless it is on the device."""
        if self._source is None and self._fetched is None:
            fetched = torch.empty_like(self._host, device=self._device, pin_memory=False)
            self._fetched = fetched
            self._done = self._offload.transfer(fetched, self._host)

    def view(self, like: "Saved") -> Tensor:
        """Return the tensor that was saved; the stream waits for it, the host does not."""
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
        # a backward pass that ended early: the allocator must not give out memory into which a copy is still running
        with contextlib.suppress(Exception):
            self._wait()


class _Call:
    """One call of a block: what it has saved, and the call before it, whose backward pass comes next."""

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
        # what comes without a gradient, as masks and rotary tables do, is shared by all blocks
        self._shared = {_address(tensor) for tensor in tensors if not tensor.requires_grad}
        self._previous = previous
        self._keeps = keeps
        self._copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()  # by id, in order
        self._leaving: list[_Copy] = []
        self._is_backward = False

    def pack(self, tensor: Tensor) -> "Saved | Kept":
        """Begin to copy a tensor to host memory, unless it stays on the device."""
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
        """Start copying back the tensors still needed, last saved first, because it is needed first."""
        with torch.no_grad():
            for copy in reversed(list(self._copies.values())):
                copy.fetch()

    def begin_backward(self) -> None:
        """Fetch the tensors for the backward pass of this block, then prefetch those of the block before it."""
        if self._is_backward:
            return
        self._is_backward = True
        self.fetch()
        previous = self._previous() if self._previous is not None else None
        if previous is not None:
            previous.fetch()

    def _state(self) -> set[int]:
        """Return where the parameters and buffers are now: under FSDP2 the unsharded ones, while the block computes."""
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
    """Return a packed tensor; marks the start of the backward pass of its block."""
    saved.call.begin_backward()
    return saved.tensor if isinstance(saved, Kept) else saved.copy.view(saved)


def _find_tensors(leaves: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a block, those in objects such as a `Rotation` included."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield leaf
        else:
            yield from (value for value in getattr(leaf, "__dict__", {}).values() if isinstance(value, Tensor))


def _address(tensor: Tensor) -> int:
    """Return what identifies the storage of a plain tensor."""
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return all of a tensor's storage, [its bytes] uint8."""
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    # not `set_`: the cache of fake tensors would hold the storage, and a plan count it
    return tensor.as_strided((num_elements,), (1,), 0).view(torch.uint8)
