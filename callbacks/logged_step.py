"""Determine which batch ends an optimizer step and which step is logged: two attribute reads per batch."""

from collections.abc import Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from .lightning_internals import forget_metrics, get_key, is_accumulating, is_row_due
from .protocols import SupportsRow


class StepCounter:
    """Detects the last micro-batch of each accumulation window.

    `trainer.global_step` counts completed optimizer steps, so a batch that ends a step changes it. The test is
    "changed" rather than "increased", because after a rollback within the process the count continues from a lower
    value. That change also shows at the first micro-batch after the rollback, hence the second condition in `stepped`.
    """

    def __init__(self) -> None:
        self._last = 0

    def start(self, trainer: Trainer) -> None:
        """Start from the trainer's current step; call it in `on_train_start` and after a rollback."""
        self._last = trainer.global_step

    def stepped(self, trainer: Trainer) -> bool:
        """Return whether the optimizer stepped in this batch; call it once per `on_train_batch_end`."""
        _forget_earlier_rows(trainer)
        before, self._last = self._last, trainer.global_step
        return self._last != before and not is_accumulating(trainer)


def is_logged_step(trainer: Trainer) -> bool:
    """Return whether Lightning writes a row at the end of the current micro-batch, from Lightning's own flags.

    Under manual optimization, such a batch need not step any optimizer.
    """
    return is_row_due(trainer) and not is_accumulating(trainer)


def completed_steps(trainer: Trainer) -> int:
    """Return the optimizer steps completed; under manual optimization, the training batches.

    Under manual optimization, `trainer.global_step` sums the steps of all optimizers, while loggers count batches.
    """
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1


# by Trainer: the batch in which callbacks last logged, and the keys of the metrics
_ROWS: WeakKeyDictionary[Trainer, tuple[int, list[str]]] = WeakKeyDictionary()


def log_row(pl_module: LightningModule, metrics: Mapping[str, float | Tensor]) -> None:
    """Add metrics to the row of this step only; Python numbers stay on the host, in float64.

    The metrics are added to `recipes_row` if the module is a `SupportsRow`, else logged with `log_dict`.
    """
    if isinstance(pl_module, SupportsRow):
        pl_module.recipes_row.update(metrics)
        return
    tensors = {
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, value in metrics.items()
    }
    # the batch size does not affect per-step values, but Lightning requires one with a `dataloader_iter`
    pl_module.log_dict(tensors, on_step=True, on_epoch=False, batch_size=1)
    batch, keys = _ROWS.setdefault(pl_module.trainer, (_get_batch(pl_module.trainer), []))
    _ROWS[pl_module.trainer] = (batch, keys + [get_key(pl_module, name) for name in tensors])


def _forget_earlier_rows(trainer: Trainer) -> None:
    batch, keys = _ROWS.get(trainer, (None, []))
    if batch is not None and batch != _get_batch(trainer):
        forget_metrics(trainer, keys)
        del _ROWS[trainer]


def _get_batch(trainer: Trainer) -> int:
    return trainer.fit_loop.epoch_loop.total_batch_idx


def run_folder(trainer: Trainer) -> Path | None:
    """Return the `log_dir` of the first logger that has one; None if none has."""
    for logger in trainer.loggers:
        folder = getattr(logger, "log_dir", None)
        if isinstance(folder, (str, Path)):
            return Path(folder)
    return None


def output_folder(trainer: Trainer) -> Path:
    """Return the run folder, else `trainer.default_root_dir`."""
    folder = run_folder(trainer)
    return Path(trainer.default_root_dir) if folder is None else folder
