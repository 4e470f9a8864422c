"""One call a logger for each logged step: about 0.2 ms, where Lightning's `log` takes that for every metric."""

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Callback

from recipes.model.init import unsharded_shape
from recipes.run_folder import SUMMARY_FILE, write_atomically
from recipes.runtime.failure import is_out_of_memory, is_peer_failure, read_peer_error
from recipes.runtime.signals import Preempted


class RowWriter(Callback):
    """Hands the row that the task and the callbacks before this one have gathered to every logger.

    Stands before the checkpoint saver, so that no checkpoint is ahead of its own row. Who acts on a step once its
    row is written, and before it is saved, has an `after_row(trainer, pl_module)`.
    """

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        row, pl_module.row = pl_module.row, {}
        if row:
            self._write(trainer, row)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "after_row"):
                callback.after_row(trainer, pl_module)

    @staticmethod
    def _write(trainer: lightning.Trainer, row: dict[str, Any]) -> None:
        numbers = {name: float(value) for name, value in row.items()}  # waits for the device
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step - 1)  # Lightning counts from 0
        tensors = {
            name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()
        }
        trainer.callback_metrics.update(tensors)  # for callbacks that monitor a metric


LOGGER = logging.getLogger("lightning_recipes")


# what other callbacks may answer in their `summary()`; each has one owner
_FROM_CALLBACKS = (
    "tokens_per_second",
    "mfu",
    "excluded_seconds",
    "peak_memory_gib",
    "rollbacks",
)


class SummaryWriter(Callback):
    """Collects the final numbers. Other callbacks add theirs through a `summary()` that returns a dict.

    Args:
        run_folder: Where the file lies.
    """

    def __init__(self, *, run_folder: Path) -> None:
        self._folder = run_folder
        self._began = time.perf_counter()
        self._has_begun = False
        self.newest: dict[str, Any] | None = None  # on rank 0
        self._seconds_before = 0.0  # of the processes that this run resumes
        self._best_val_loss: float | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._began = time.perf_counter()
        self._has_begun = True

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        val_loss = _metric(trainer, "val/loss")
        if val_loss is not None:
            best = self._best_val_loss
            self._best_val_loss = val_loss if best is None else min(best, val_loss)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._write(trainer, pl_module, "finished")

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException
    ) -> None:
        status = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
        if hasattr(exception, "exit_code"):
            status = "diverged"
        if isinstance(exception, Preempted):
            status = "preempted"
        by_other = is_peer_failure(exception) and read_peer_error(self._folder) is not None
        if is_out_of_memory(exception) or by_other:
            status = "out_of_memory"
        self._write(trainer, pl_module, status)

    def state_dict(self) -> dict[str, Any]:
        return {"best_val_loss": self._best_val_loss, "seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best_val_loss = state_dict["best_val_loss"]
        self._seconds_before = state_dict["seconds"]

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._began

    def _write(self, trainer: lightning.Trainer, pl_module: Any, status: str) -> None:
        leaves_it = not self._has_begun and (self._folder / SUMMARY_FILE).exists()
        if leaves_it or not trainer.is_global_zero:
            return  # a resume that fails leaves the run it meant as it was
        summary: dict[str, Any] = {
            "status": status,
            "steps": trainer.global_step,
            "samples": pl_module.num_samples,
            "tokens": pl_module.num_tokens,
            "train_loss": _metric(trainer, "train/loss"),
            "val_loss": _metric(trainer, "val/loss"),
            "best_val_loss": self._best_val_loss,
            "seconds": round(self._seconds(), 3),
            "tokens_per_second": None,
            "mfu": None,
            "excluded_seconds": None,
            "peak_memory_gib": None,
            "rollbacks": 0,
            "skipped_steps": 0,
            "num_parameters": sum(unsharded_shape(p).numel() for p in pl_module.parameters()),
        }
        num_skipped = 0
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if callback is not self and hasattr(callback, "summary"):
                theirs = callback.summary()
                summary |= {key: theirs[key] for key in _FROM_CALLBACKS if key in theirs}
                num_skipped += theirs.get("skipped_steps", 0)  # by a loss scaler, and as a spike
        summary["skipped_steps"] = num_skipped
        self.newest = summary
        try:
            write_atomically(self._folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            LOGGER.error(f"{SUMMARY_FILE} could not be written: {error.strerror}")


def _metric(trainer: lightning.Trainer, name: str) -> float | None:
    """A logged number; None where there is none, or where it is not finite (JSON has no NaN)."""
    if name not in trainer.callback_metrics:
        return None
    value = float(trainer.callback_metrics[name])
    return value if math.isfinite(value) else None
