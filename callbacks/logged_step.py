"""Which batch ends an optimizer step, and which step is logged: two attribute reads per batch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor


class StepCounter:
    """Finds the last micro-batch of each accumulation window.

    `trainer.global_step` counts completed optimizer steps, so a batch that ends a step changes it. The test is
    "changed", not "grew": after a rollback inside the process the count continues from a lower value. That change
    also shows at the first micro-batch after the rollback, hence the second condition in `stepped`.
    """

    def __init__(self) -> None:
        self._last = 0

    def start(self, trainer: Trainer) -> None:
        """Start from the trainer's present step; call it in `on_train_start` and after a rollback."""
        self._last = trainer.global_step

    def stepped(self, trainer: Trainer) -> bool:
        """Return whether the optimizer stepped in this batch; call it once per `on_train_batch_end`."""
        before, self._last = self._last, trainer.global_step
        return self._last != before and not trainer.fit_loop._should_accumulate()


def is_logged_step(trainer: Trainer) -> bool:
    """Return whether Lightning writes a row at the end of the current optimizer step.

    This reads the flag that Lightning itself uses. With one optimizer it is
    `(steps completed after this one) % log_every_n_steps == 0`, or `trainer.should_stop`.
    """
    return trainer._logger_connector.should_update_logs


def log_row(pl_module: LightningModule, metrics: Mapping[str, float | Tensor]) -> None:
    """Add metrics to the row of this step. Python numbers stay on the host, in float64.

    A module whose class sets `writes_rows = True` gathers its rows in a dict `row`, which is written once per step:
    Lightning's `log` costs about 0.2 ms per metric. Any other module logs through `log_dict`.
    """
    if getattr(pl_module, "writes_rows", False):
        row: Any = pl_module.row
        row |= metrics
        return
    tensors = {
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, value in metrics.items()
    }
    pl_module.log_dict(tensors, on_step=True, on_epoch=False)


def run_folder(trainer: Trainer) -> Path | None:
    """Return the `log_dir` of the first of `trainer.loggers` that has one; None if none has."""
    for logger in trainer.loggers:
        folder = getattr(logger, "log_dir", None)
        if isinstance(folder, (str, Path)):
            return Path(folder)
    return None
