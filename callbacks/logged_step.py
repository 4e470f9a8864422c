"""Which batch ends an optimizer step, and which step ends in a row: two attribute reads a batch."""

from collections.abc import Mapping
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor


class StepCounter:
    """Tells the last micro-batch of an accumulation window from the others.

    `trainer.global_step` counts completed optimizer steps, so a batch that ends one changes it.
    Changed, not grown: after a rollback inside the process it counts on from a lower number, which the first
    micro-batch after it shows too.
    """

    def __init__(self) -> None:
        self._last = 0

    def start(self, trainer: Trainer) -> None:
        self._last = trainer.global_step

    def stepped(self, trainer: Trainer) -> bool:
        """Call once per `on_train_batch_end`: did the optimizer step in this batch?"""
        before, self._last = self._last, trainer.global_step
        return self._last != before and not trainer.fit_loop._should_accumulate()


def is_logged_step(trainer: Trainer) -> bool:
    """Does Lightning write a row at the end of the optimizer step that is under way?

    This asks the flag that Lightning itself obeys. With one optimizer it is
    `(steps completed after this one) % log_every_n_steps == 0`, or `trainer.should_stop`.
    """
    return trainer._logger_connector.should_update_logs


def log_row(pl_module: LightningModule, metrics: Mapping[str, float | Tensor]) -> None:
    """Add `metrics` to this step's row. Host numbers stay on the host, in float64.

    A module may gather its rows itself, in a `log_row` of its own: Lightning's `log` takes about 0.2 ms a metric.
    """
    own = getattr(pl_module, "log_row", None)
    if callable(own):
        own(metrics)
        return
    row = {
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, value in metrics.items()
    }
    pl_module.log_dict(row, on_step=True, on_epoch=False)


def run_folder(trainer: Trainer) -> Path | None:
    """The `log_dir` of the first of `trainer.loggers` that has one; None if there is none."""
    for logger in trainer.loggers:
        folder = getattr(logger, "log_dir", None)
        if isinstance(folder, (str, Path)):
            return Path(folder)
    return None
