"""Writes checkpoints behind training: one file a rank, a manifest last, one rename. One at a time.

Costs what `HostStaging` costs, a thread while it writes, and two small messages between the ranks' threads.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from recipes.checkpoint.layout import RUN_FILE, serialized, shard_name
from recipes.checkpoint.manifest import MANIFEST_FILE, FileRecord, Manifest, find_fault, sync
from recipes.checkpoint.retention import LAST, UNFINISHED, set_aside, update_symlink
from recipes.checkpoint.shard_file import Part, write_shard
from recipes.checkpoint.staging import HostStaging

LOGGER = logging.getLogger("lightning_recipes")
_NEVER = timedelta(days=1)
_OF_DISKS = "make room or mend the disk, or checkpoint.keep_last=1"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one save ended.

    Attributes:
        path: The checkpoint's folder.
        step: Optimizer steps completed in it.
        bytes: Of all its files.
        seconds: From the request until it was proven: complete, hashed, on the disk and under its name.
        stall_seconds: Of these, how long training waited.
        refused: Why it was not kept although it could be written: a number in it is not finite.
        error: Why it could not be written.
    """

    path: Path
    step: int
    bytes: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    refused: str | None = None
    error: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether there is a checkpoint."""
        return self.refused is None and self.error is None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank's thread tells the others."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    not_finite: str | None = None
    error: str | None = None


class CheckpointWriter:
    """Saves on every rank at once.

    Args:
        asynchronous: Whether training goes on while the checkpoint is written.
        after: Called on rank 0 with the folder of checkpoints once a new one is proven: removes old ones.
    """

    def __init__(self, *, asynchronous: bool, after: Callable[[Path], None]) -> None:
        self._asynchronous = asynchronous
        self._after = after
        self._copy = HostStaging()
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._stall_seconds = 0.0
        self._group: Any = None

    def connect(self) -> None:
        """Give the threads of the ranks a group of their own. A collective, once, before the first save."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=_NEVER)

    def begin(
        self, path: Path, plain: Mapping[str, Any], parts: Mapping[str, Part], manifest: Manifest
    ) -> None:
        """Start to save; waits for the save before this one.

        Args:
            path: The checkpoint's folder to be.
            plain: The run's state without tensors; rank 0's is written.
            parts: Tensors that this rank writes.
            manifest: Everything but the files.
        """
        began = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._stall_seconds = 0.0
        content, problem = None, None
        try:
            content = serialized(plain) if rank == 0 else None
            self._copy.begin(parts)
        except Exception as error:  # the other ranks' threads hear of it from this one's
            problem = _says(error)
        arguments = (path, content, problem, manifest, rank, began)
        self._thread = threading.Thread(target=self._save, args=arguments, name="save", daemon=True)
        self._thread.start()
        if not self._asynchronous:
            self._thread.join()
        self._stall_seconds += time.perf_counter() - began

    def wait_until_copied(self) -> None:
        """Call before tensors change."""
        began = time.perf_counter()
        self._copy.wait()
        self._stall_seconds += time.perf_counter() - began

    def ended(self, *, wait: bool = False) -> Outcome | None:
        """How the newest save ended, once; None while it is under way.

        Args:
            wait: Whether to wait for it.
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
        assert outcome is not None, "the thread leaves one, whatever happens"
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
        """The thread: never raises."""
        unfinished = path.with_name(path.name + UNFINISHED)
        outcome = Outcome(path=path, step=manifest.step, error="the thread that writes it ended")
        try:
            report = Report(error=problem)
            if problem is None:
                report = self._write_files(unfinished, content, rank)
            reports = self._all(report)
            mine = _judged(path, manifest, reports)
            if rank == 0:
                mine = self._finish(unfinished, mine, manifest, reports)
            outcome = self._all(mine)[0]
            if rank == 0 and outcome.is_whole:
                self._clean(path.parent)
        except Exception as error:
            outcome = Outcome(path=path, step=manifest.step, error=_says(error))
            shutil.rmtree(unfinished, ignore_errors=True)
        finally:
            seconds = time.perf_counter() - began
            fields = vars(outcome) | {"seconds": seconds, "stall_seconds": self._stall_seconds}
            self._outcome = Outcome(**fields)

    def _write_files(self, folder: Path, content: bytes | None, rank: int) -> Report:
        try:
            parts = self._copy.fill()
            folder.mkdir(parents=True, exist_ok=True)
            files = {}
            if content is not None:
                files[RUN_FILE] = _write(folder / RUN_FILE, content)
            written = write_shard(folder / shard_name(rank), parts)
        except Exception as error:  # the other ranks wait for a word from this one
            return Report(error=_says(error))
        files[shard_name(rank)] = written.record
        return Report(files=files, not_finite=written.not_finite)

    def _finish(
        self, unfinished: Path, judged: Outcome, manifest: Manifest, reports: list[Report]
    ) -> Outcome:
        """On rank 0: the manifest, the rename, the link; or nothing is left."""
        path = judged.path
        try:
            if judged.is_whole:
                files = {
                    name: record for report in reports for name, record in report.files.items()
                }
                whole = Manifest(**vars(manifest) | {"files": files})
                _write(unfinished / MANIFEST_FILE, whole.text().encode())
                sync(unfinished)
                if (why := find_fault(unfinished)) is not None:
                    raise FileNotFoundError(f"{why}; hydra.run.dir=<a folder that all nodes share>")
                old = set_aside(path) if path.exists() else None
                unfinished.rename(path)
                if old is not None:
                    # only now: a kill before has cost the name, which `recover_interrupted` gives again
                    shutil.rmtree(old, ignore_errors=True)
                sync(path.parent)
                update_symlink(path.parent / LAST, path.name)
                sync(path.parent)
                return Outcome(path=path, step=judged.step, bytes=whole.total_bytes)
        except Exception as error:  # the other ranks wait for a verdict
            judged = Outcome(path=path, step=judged.step, error=_says(error))
        shutil.rmtree(unfinished, ignore_errors=True)  # makes room
        return judged

    def _clean(self, folder: Path) -> None:
        try:
            self._after(folder)
        except OSError as error:
            LOGGER.warning("Old checkpoints could not be removed: %s", _says(error))

    def _all(self, mine: Any) -> list[Any]:
        """What every rank's thread has to say."""
        if self._group is None:
            return [mine]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine, group=self._group)
        return every


def _judged(path: Path, manifest: Manifest, reports: list[Report]) -> Outcome:
    """The same verdict on every rank."""
    error = next((report.error for report in reports if report.error is not None), None)
    name = next((report.not_finite for report in reports if report.not_finite is not None), None)
    refused = None if name is None else f"{name} is not finite"
    return Outcome(path=path, step=manifest.step, error=error, refused=refused)


def _write(path: Path, content: bytes) -> FileRecord:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(bytes=len(content), xxh3_128=xxhash.xxh3_128_hexdigest(content))


def _says(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}; {_OF_DISKS}"
    return f"{type(error).__name__}: {error}"
