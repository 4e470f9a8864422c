"""Write summary.json, the outcome of a run, with fields declared by callbacks."""

import json
import math
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from recipes.checkpoint.saver import list_losses
from recipes.errors import ConfigError
from recipes.files import tolerating, write_atomically
from recipes.lightning_internals import get_callbacks, list_validated
from recipes.model.init import unsharded_shape
from recipes.run_folder import EVALUATIONS, SUMMARY_FILE, read_summary
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.failure import is_out_of_memory, is_peer_failure, read_oom_of_other_rank
from recipes.runtime.signals import Preempted

_VAL_LOSS = "val/loss"


class SummaryWriter(Callback):
    """Writes summary.json when the run ends: its own fields, then those that other callbacks declare.

    A callback declares `summary_fields`, a dict from field to initial value, and returns values from a method
    `summary()`. Fields in its `summed_fields` add up over all callbacks that report them, such as the steps skipped by
    a loss scaler and as loss spikes; any other field has one owner.

    Args:
        run_folder: Folder for summary.json.
        monitor: Metric that ranks checkpoints: of the losses of a LightningModule of one's own, it is the one to keep.
        find_ending: Returns why the run ends, as a value with an attribute `by`; None if that is not known.

    Attributes:
        newest: Last written summary, on rank 0; None before the first.
    """

    def __init__(
        self,
        *,
        run_folder: Path,
        monitor: str = _VAL_LOSS,
        find_ending: Callable[[lightning.Trainer], Any] = lambda _: None,
    ) -> None:
        self._folder = run_folder
        self._monitor = monitor
        self._val_loss = _VAL_LOSS  # name by which it is logged
        self._find_ending = find_ending
        self._began = time.perf_counter()
        self._has_begun = False
        self.newest: dict[str, Any] | None = None
        self._earlier_seconds = 0.0  # of earlier processes of this run
        self._best_val_loss: float | None = None

    @override
    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._began = time.perf_counter()
        self._has_begun = True

    @override
    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._val_loss = self._find_val_loss(trainer)
        val_loss = _get_metric(trainer, self._val_loss)
        if val_loss is not None:
            best = self._best_val_loss
            self._best_val_loss = val_loss if best is None else min(best, val_loss)

    def _find_val_loss(self, trainer: lightning.Trainer) -> str:
        """Return the name of the loss that a validation has logged: the one of a module of one's own has any name."""
        losses = [] if _VAL_LOSS in trainer.callback_metrics else list_losses(list_validated(trainer))
        chosen = [name for name in losses if name == self._monitor] or losses
        return chosen[0] if len(chosen) == 1 else _VAL_LOSS

    @override
    def on_fit_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        loss = trainer.callback_metrics.get("train/loss")
        # a loss that was not logged is not a bad one
        is_bad = loss is not None and not math.isfinite(float(loss))
        self._write(trainer, pl_module, "diverged" if is_bad else "finished")

    @override
    def on_exception(self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException) -> None:
        status = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
        if getattr(exception, "exit_code", None) == ExitCode.DIVERGED:
            status = "diverged"
        by = None
        if isinstance(exception, Preempted):
            is_lost = exception.by == signal.SIGINT.name and not exception.saved
            status, by = "interrupted" if is_lost else "preempted", exception.by
        of_peer = is_peer_failure(exception) and read_oom_of_other_rank(self._folder) is not None
        if is_out_of_memory(exception) or of_peer:
            status = "out_of_memory"
        self._write(trainer, pl_module, status, ended_by=by)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "val_loss": self._val_loss,
            "best_val_loss": self._best_val_loss,
            "seconds": self._get_seconds(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._val_loss = state_dict.get("val_loss", _VAL_LOSS)  # none from earlier versions
        self._best_val_loss = state_dict["best_val_loss"]
        self._earlier_seconds = state_dict["seconds"]

    def _get_seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._began

    def _write(self, trainer: lightning.Trainer, pl_module: Any, status: str, *, ended_by: str | None = None) -> None:
        # a resume that fails before it trains keeps the summary of the earlier start
        is_failed_resume = not self._has_begun and (self._folder / SUMMARY_FILE).exists()
        if is_failed_resume or not trainer.is_global_zero:
            return
        evaluations = self._read_evaluations()
        if ended_by is None and status in ("finished", "diverged"):
            ended_by = getattr(self._find_ending(trainer), "by", None)
        num_samples, num_tokens = pl_module.recipes_consumed()
        self.newest = {
            "status": status,
            "ended_by": ended_by,
            "steps": trainer.global_step,
            "samples": num_samples,
            "tokens": num_tokens,
            "train_loss": _get_metric(trainer, "train/loss"),
            "val_loss": _get_metric(trainer, self._val_loss),
            "best_val_loss": self._best_val_loss,
            "measures": pl_module.list_measures(),
            "seconds": round(self._get_seconds(), 3),
            **collect_summary_fields(get_callbacks(trainer)),
            "num_parameters": sum(unsharded_shape(p).numel() for p in pl_module.parameters()),
            **evaluations,
        }
        with tolerating(self._folder / SUMMARY_FILE):
            write_atomically(self._folder / SUMMARY_FILE, json.dumps(self.newest, indent=2) + "\n")

    def _read_evaluations(self) -> dict[str, Any]:
        """Return the evaluations in summary.json written by `mode=evaluate`; each names its checkpoint."""
        try:
            earlier = read_summary(self._folder) or {}
        except ConfigError:  # damaged: it is rewritten completely
            earlier = {}
        return {EVALUATIONS: earlier[EVALUATIONS]} if EVALUATIONS in earlier else {}


def collect_summary_fields(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the summary fields that callbacks declare, with their current values."""
    fields: dict[str, Any] = {}
    for callback in callbacks:
        declared: dict[str, Any] = getattr(callback, "summary_fields", {})
        if not declared:
            continue
        summed: frozenset[str] = getattr(callback, "summed_fields", frozenset())
        values = callback.summary()
        for name, default in declared.items():
            value = values.get(name, default)
            fields[name] = fields[name] + value if name in summed and name in fields else value
    return fields


def _get_metric(trainer: lightning.Trainer, name: str) -> float | None:
    """Return a logged metric; None if it was not logged, or is NaN or inf, which JSON cannot hold."""
    if name not in trainer.callback_metrics:
        return None
    value = float(trainer.callback_metrics[name])
    return value if math.isfinite(value) else None
