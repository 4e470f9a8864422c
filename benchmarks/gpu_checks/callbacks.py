"""Callbacks that checks add to a run: a kill, a failing rank, a digest of the train state, a synchronization log."""

import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
import xxhash
from lightning.pytorch.callbacks import Callback

from callbacks.loss_spike.train_state import live_tensors
from gpu_checks.runs import ROOT, wait_for_checkpoint


class KillAt(Callback):
    """Kills its process after an optimizer step, once an earlier checkpoint is complete; does nothing in a resumed run.

    Args:
        step: Number of optimizer steps before the kill.
        after_checkpoint: Step of the checkpoint to wait for.
    """

    def __init__(self, *, step: int, after_checkpoint: int) -> None:
        self.step = step
        self.after_checkpoint = after_checkpoint
        self._is_resumed = False

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._is_resumed = trainer.global_step > 0

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and not self._is_resumed:
            wait_for_checkpoint(Path(trainer.default_root_dir), self.after_checkpoint)
            os.kill(os.getpid(), signal.SIGKILL)


class FailAt(Callback):
    """Raises on one rank after an optimizer step."""

    def __init__(self, *, step: int, rank: int) -> None:
        self.step = step
        self.rank = rank

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            raise RuntimeError(f"rank {self.rank} fails at step {self.step}, as the check demands")


class StateDigests(Callback):
    """Hashes weights and optimizer state after every step, and again after each rollback.

    Attributes:
        after_step: Digests by step (last execution of that step), then by tensor.
        rollbacks: (from step, to step, tensors compared, names of tensors that differ from their state at that step).
    """

    def __init__(self) -> None:
        self.after_step: dict[int, dict[str, str]] = {}
        self.rollbacks: list[tuple[int, int, int, list[str]]] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.after_step[trainer.global_step] = digest_state(trainer)

    def on_rollback(self, trainer: lightning.Trainer, pl_module: Any, from_step: int, to_step: int) -> None:
        restored, original = digest_state(trainer), self.after_step[to_step]
        # ZeRO-3 sometimes keeps gathered copies of some weights; all other tensors are in both
        common = sorted(restored.keys() & original.keys())
        unequal = [name for name in common if restored[name] != original[name]]
        self.rollbacks.append((from_step, to_step, len(common), unequal))


def digest_state(trainer: lightning.Trainer) -> dict[str, str]:
    """Return the XXH3-128 of each of this rank's weights, buffers and optimizer state tensors."""
    digests = {}
    for name, tensor in live_tensors(trainer, writes_back=False):
        flat = tensor.detach().cpu().contiguous().reshape(-1)  # [N]
        digests[name] = xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy())
    return digests


class SyncRecorder(Callback):
    """Records every wait of the host for the GPU in a range of optimizer steps, with the lines that caused it.

    CUDA reports copies and reads that block (`torch.cuda.set_sync_debug_mode`); `torch.cuda.synchronize`, which it
    does not report, is recorded as well. Waiting for an event is allowed: the spike detector reads a step's values
    after the next step has been queued.

    Args:
        first_step: First optimizer step in the range, from 1; recording begins before its training batch is used.
        last_step: Last step; recording ends when the next batch has been fetched.
        set_mode: Function with the signature of `torch.cuda.set_sync_debug_mode`.

    Attributes:
        waits: Source lines of this project, innermost last, one string per wait.
        num_steps: Number of optimizer steps recorded.
    """

    def __init__(
        self,
        *,
        first_step: int,
        last_step: int,
        set_mode: Callable[[str], None] = torch.cuda.set_sync_debug_mode,
    ) -> None:
        self.first_step = first_step
        self.last_step = last_step
        self.waits: list[str] = []
        self.num_steps = 0
        self._set_mode = set_mode
        self._undo: list[Callable[[], None]] = []

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1
        if step == self.first_step and not self._undo:
            self._begin()
        if step > self.last_step and self._undo:
            self.end()

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.num_steps += bool(self._undo)

    def on_exception(self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.end()

    def _begin(self) -> None:
        show, synchronize = warnings.showwarning, torch.cuda.synchronize
        caught = warnings.catch_warnings()

        def record_warning(message: Any, category: Any, *arguments: Any, **more: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                self.waits.append(_describe_stack())
            else:
                show(message, category, *arguments, **more)

        def record_synchronize(*arguments: Any) -> None:
            self.waits.append(_describe_stack())
            synchronize(*arguments)

        caught.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = record_warning
        torch.cuda.synchronize = record_synchronize
        self._set_mode("warn")
        self._undo = [
            lambda: self._set_mode("default"),
            lambda: setattr(torch.cuda, "synchronize", synchronize),
            lambda: caught.__exit__(None, None, None),
        ]

    def end(self) -> None:
        """Stop recording."""
        for undo in self._undo:
            undo()
        self._undo = []


def _describe_stack() -> str:
    """Return the innermost three stack frames in this project, and the innermost frame overall."""
    frames = traceback.extract_stack()[:-2]
    ours = [frame for frame in frames if frame.filename.startswith(str(ROOT)) and "site-packages" not in frame.filename]
    shown = [*ours[-3:], *([] if ours and ours[-1] is frames[-1] else frames[-1:])]
    return " > ".join(f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}" for frame in shown)


class StepClock(Callback):
    """Times windows of optimizer steps with its own clock, from the first batch of a window to that of the next.

    Args:
        every: Number of optimizer steps per window.

    Attributes:
        step_seconds: Mean over each window, by its last step.
    """

    def __init__(self, *, every: int) -> None:
        self.every = every
        self.step_seconds: dict[int, float] = {}
        self._began: float | None = None

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every:
            return
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._began is not None:
            self.step_seconds[trainer.global_step] = (now - self._began) / self.every
        self._began = now


class WaitsForSaves(Callback):
    """Waits until a save has ended before the next one is due, so that saves never overlap.

    A checkpoint is complete before its save has ended: old ones, which may be large, are removed after it.
    """

    def __init__(self, *, save_every: int) -> None:
        self.save_every = save_every

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step > self.save_every and step % self.save_every == self.save_every - 1:
            wait_for_checkpoint(Path(trainer.default_root_dir), step - self.save_every + 1)
            for thread in threading.enumerate():
                if thread.name == "save":  # of `recipes.checkpoint.writer`
                    thread.join()
