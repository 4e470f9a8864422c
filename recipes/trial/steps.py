"""Take a few optimizer steps of a run without its loggers, callbacks, validation and checkpoints."""

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from recipes.build import Run, build
from recipes.checkpoint.resume import find_checkpoint, read_step
from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError
from recipes.lightning_internals import get_callbacks


def take_steps(resolved: ResolvedRun, *, num_steps: int, callbacks: Sequence[Callback]) -> Run:
    """Build a run and train it for some steps, from initial weights or from the checkpoint it resumes from.

    Every call starts from the same weights, data position and RNG state as the run.

    Args:
        resolved: Checked run with a trial mode. Nothing is written to its folder, which `resume=auto` reads.
        num_steps: Optimizer steps.
        callbacks: Callbacks that run at every step.

    Returns:
        The run after its last step.

    Raises:
        ConfigError: The machine, the data or a checkpoint does not support the config.
        KeyboardInterrupt: Ctrl-C.
    """
    checkpoint = find_checkpoint(resolved.resume, resolved.run_folder)
    first_step = 0 if checkpoint is None else read_step(checkpoint)
    length = {"trainer.max_steps": first_step + num_steps, "trainer.min_steps": None}
    run = build(resolved.with_settings(length | {"trainer.limit_val_batches": 0, "log_every": 1}))
    run.data.prepare_data()
    get_callbacks(run.trainer).extend(callbacks)
    try:
        run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    except SystemExit as exit_request:
        # Lightning turns Ctrl-C into exit(1), which looks like a crash
        if run.trainer.interrupted:
            raise KeyboardInterrupt from exit_request
        raise
    return run


def sized(resolved: ResolvedRun, *, micro_batch_size: int, num_micro_batches: int) -> ResolvedRun:
    """Return the run with another global batch and another split of it."""
    return resolved.with_settings(
        {
            "micro_batch_size": micro_batch_size,
            "global_batch_size": micro_batch_size * num_micro_batches * resolved.num_data_ranks,
            "trainer.accumulate_grad_batches": None,
        }
    )


def reject_resume(resolved: ResolvedRun) -> None:
    """Reject a checkpoint for a trial that starts from initial weights.

    Raises:
        ConfigError: There is one.
    """
    if resolved.resume is not None:
        mode = resolved.mode.name
        raise ConfigError(
            f"resume={resolved.resume} mode={mode}", "the trial starts from the initial weights", "resume=null"
        )


class LossRecorder(Callback):
    """Records the loss and the learning rate of every step, and stops once the loss diverges.

    Args:
        max_ratio: Stop if the loss is this many times its lowest so far, or NaN or inf; None never stops.

    Attributes:
        losses: Training loss of each step over all ranks.
        learning_rates: Learning rates of the first parameter group.
    """

    def __init__(self, *, max_ratio: float | None = None) -> None:
        self.losses: list[float] = []
        self.learning_rates: list[float] = []
        self._max_ratio = max_ratio

    @override
    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        row, pl_module.recipes_row = pl_module.recipes_row, {}
        if "train/loss" not in row:  # a micro-batch before the last
            return
        loss = float(row["train/loss"])  # synchronizes with the device
        self.losses.append(loss)
        self.learning_rates.append(float(row["lr"]))
        if self._max_ratio is not None and not (math.isfinite(loss) and loss <= self._max_ratio * min(self.losses)):
            # every rank has the same sum of losses, so all of them stop here
            trainer.should_stop = True
