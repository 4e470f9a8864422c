"""Write checkpoints in the background, one at a time: one file per rank, then the manifest, then one rename.

In addition to `HostStaging` this needs a thread while writing, and two small messages between the ranks' threads.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from recipes.checkpoint.layout import RUN_FILE, serialize, shard_name, values_part
from recipes.checkpoint.manifest import MANIFEST_FILE, FileRecord, Manifest, find_fault
from recipes.checkpoint.retention import LAST, UNFINISHED, set_aside, update_symlink
from recipes.checkpoint.shard_file import Part, write_shard
from recipes.files import sync, tolerating
from recipes.numerics.collectives import gather_objects
from recipes.runtime.host_group import connect_hosts

LOGGER = logging.getLogger("lightning_recipes")
_DISK_FIX = "make room or fix the disk, or checkpoint.keep_last=1"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one save.

    Attributes:
        path: Folder of the checkpoint.
        step: Optimizer steps completed.
        bytes: Total size of its files.
        seconds: Time from the request until the checkpoint was hashed, on disk and renamed.
        stall_seconds: Part of this time during which training waited.
        rejected: Why it was discarded after writing: it contains NaN or inf. None otherwise.
        error: Why it could not be written; None on success.
    """

    path: Path
    step: int
    bytes: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    rejected: str | None = None
    error: str | None = None

    @property
    def is_valid(self) -> bool:
        """Whether the checkpoint exists."""
        return self.rejected is None and self.error is None


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Message from one rank's thread to the others.

    Attributes:
        files: Files that it wrote, by name.
        not_finite: Name of its first tensor with NaN or inf; None if there is none.
        error: Why it could not write; None on success.
    """

    files: dict[str, FileRecord] = field(default_factory=dict)
    not_finite: str | None = None
    error: str | None = None


class CheckpointWriter:
    """Saves on all ranks together.

    Args:
        async_save: Whether training continues while the checkpoint is written.
        after: Called on rank 0 with the checkpoints folder once a new checkpoint is complete; removes old ones.

    Attributes:
        is_copying: Whether a save may still be reading tensors: call `wait_until_copied` before they change.
    """

    def __init__(self, *, async_save: bool, after: Callable[[Path], None]) -> None:
        self._async_save = async_save
        self._after = after
        self._staging = HostStaging()
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._stall_seconds = 0.0
        self._group: Any = None
        self.is_copying = False

    def connect(self) -> None:
        """Create a process group for the ranks' threads. A collective, once, before the first save.

        In the training process group their messages would interleave with training's in an order that differs between
        ranks: a deadlock. Without a long timeout a slow disk on one rank would end the run.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = connect_hosts()

    def begin(
        self,
        path: Path,
        plain: Mapping[str, Any],
        parts: Mapping[str, Part],
        manifest: Manifest,
        *,
        of_rank: Mapping[str, Any] | None = None,
    ) -> None:
        """Start a save, after waiting for the previous one.

        Args:
            path: Folder of the new checkpoint.
            plain: State of the run without tensors; only rank 0's is written.
            parts: Tensors that this rank writes.
            manifest: Manifest, complete except for its files.
            of_rank: Plain state of this rank alone, written with its tensors; None if there is none.
        """
        began = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._stall_seconds = 0.0
        self.is_copying = True
        content, problem = None, None
        try:
            # not in the thread: training changes the state as soon as this returns
            content = serialize(plain) if rank == 0 else None
            self._staging.begin({**parts, **values_part(dict(of_rank or {}), rank=rank)})
        except Exception as error:  # reported by the thread: the other ranks' threads wait for it
            problem = _describe(error)
        arguments = (path, content, problem, manifest, rank, began)
        # daemon: a process that must exit now does not wait for a hung disk
        self._thread = threading.Thread(target=self._save, args=arguments, name="save", daemon=True)
        self._thread.start()
        if not self._async_save:
            self._thread.join()
        self._stall_seconds += time.perf_counter() - began

    def wait_until_copied(self) -> None:
        """Wait until tensors may change; call before every optimizer step, or the files mix two steps."""
        began = time.perf_counter()
        self._staging.wait()
        self.is_copying = False
        self._stall_seconds += time.perf_counter() - began

    def poll(self, *, wait: bool = False) -> Outcome | None:
        """Return the outcome of the latest save once; None if it is still running, already returned or never started.

        Args:
            wait: Whether to wait for it to finish.
        """
        if self._thread is None:
            return None
        if wait:
            began = time.perf_counter()
            self._thread.join()
            self._stall_seconds += time.perf_counter() - began
        if self._thread.is_alive():
            return None
        self._thread, outcome = None, self._outcome
        assert outcome is not None, "the thread sets one in every case"
        # waiting for the thread, here or in `begin`, is a stall that the thread could not count itself
        return replace(outcome, stall_seconds=self._stall_seconds)

    def _save(
        self,
        path: Path,
        content: bytes | None,
        problem: str | None,
        manifest: Manifest,
        rank: int,
        began: float,
    ) -> None:
        """Run in the thread; never raises.

        Both messages are exchanged even after a failure: if a rank left early, the others would wait for it.
        """
        unfinished = path.with_name(path.name + UNFINISHED)
        outcome = Outcome(path=path, step=manifest.step, error="the thread that writes it ended")
        try:
            report = RankReport(error=problem)
            if problem is None:
                report = self._write_files(unfinished, content, rank)
            reports = gather_objects(report, self._group)
            outcome = _judge(path, manifest, reports)
            if rank == 0:
                outcome = self._finish(unfinished, outcome, manifest, reports)
            # from rank 0, the only rank that knows whether the rename succeeded
            outcome = gather_objects(outcome, self._group)[0]
            if rank == 0 and outcome.is_valid:
                self._clean(path.parent)
        except Exception as error:
            outcome = Outcome(path=path, step=manifest.step, error=_describe(error))
            shutil.rmtree(unfinished, ignore_errors=True)
        finally:
            self._outcome = replace(outcome, seconds=time.perf_counter() - began)

    def _write_files(self, folder: Path, content: bytes | None, rank: int) -> RankReport:
        try:
            parts = self._staging.fill()
            folder.mkdir(parents=True, exist_ok=True)
            files = {}
            if content is not None:
                files[RUN_FILE] = _write(folder / RUN_FILE, content)
            files[shard_name(rank)], not_finite = write_shard(folder / shard_name(rank), parts)
        except Exception as error:  # reported: the other ranks wait for this rank's message
            return RankReport(error=_describe(error))
        return RankReport(files=files, not_finite=not_finite)

    def _finish(self, unfinished: Path, outcome: Outcome, manifest: Manifest, reports: list[RankReport]) -> Outcome:
        """On rank 0, write the manifest, rename the folder and update the link, or remove everything.

        The order makes a kill at any point harmless: every file is on disk before the manifest, the manifest before the
        name, the name before the link.
        """
        path = outcome.path
        try:
            if outcome.is_valid:
                files = {name: record for report in reports for name, record in report.files.items()}
                complete = replace(manifest, files=files)
                _write(unfinished / MANIFEST_FILE, complete.text().encode())
                # a rename may reach the disk before the folder's entries: after a power cut it would be empty
                sync(unfinished)
                # rank 0 must see the files of all ranks: on separate local disks they could never be loaded
                if (reason := find_fault(unfinished)) is not None:
                    raise FileNotFoundError(f"{reason}; hydra.run.dir=<a folder that all nodes share>")
                replaced = set_aside(path) if path.exists() else None
                unfinished.rename(path)
                if replaced is not None:
                    # only now: after a kill between the two renames `recover_interrupted` restores the old one
                    shutil.rmtree(replaced, ignore_errors=True)
                sync(path.parent)
                with tolerating(path.parent / LAST):  # the checkpoint is complete without it
                    update_symlink(path.parent / LAST, path.name)
                    sync(path.parent)
                return Outcome(path=path, step=outcome.step, bytes=complete.total_bytes)
        except Exception as error:  # returned: the other ranks wait for the outcome
            outcome = Outcome(path=path, step=outcome.step, error=_describe(error))
        shutil.rmtree(unfinished, ignore_errors=True)  # makes room for the next one
        return outcome

    def _clean(self, folder: Path) -> None:
        try:
            self._after(folder)
        except OSError as error:
            LOGGER.warning("Old checkpoints could not be removed: %s", _describe(error))


def _judge(path: Path, manifest: Manifest, reports: list[RankReport]) -> Outcome:
    """Return the same outcome on every rank."""
    error = next((report.error for report in reports if report.error is not None), None)
    name = next((report.not_finite for report in reports if report.not_finite is not None), None)
    rejected = None if name is None else f"{name} is not finite"
    return Outcome(path=path, step=manifest.step, error=error, rejected=rejected)


def _write(path: Path, content: bytes) -> FileRecord:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(bytes=len(content), xxh3_128=xxhash.xxh3_128_hexdigest(content))


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}; {_DISK_FIX}"
    return f"{type(error).__name__}: {error}"


# Copy tensors to host memory during the next forward and backward pass; only the optimizer step waits for it.
#
# Needs host memory for the copied tensors, reused between copies. For tensors on a GPU it is pinned, and torch rounds
# each pinned tensor up to a power of two: up to twice the size.


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
            self._stream = torch.cuda.Stream()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for name in names:
                tensor = self._sources[name].tensor
                self._buffer(name).copy_(tensor, non_blocking=True)
                # else the allocator may reuse a cloned buffer's memory while it is still being copied
                tensor.record_stream(stream)
        copied = torch.cuda.Event()
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
