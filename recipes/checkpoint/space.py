"""Whether the disk will hold the checkpoints of this run: asked after the first step, when their size is known."""

import logging
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch

from recipes.checkpoint.layout import take_apart
from recipes.checkpoint.retention import Retention, manifests
from recipes.checkpoint.shard_file import Part

LOGGER = logging.getLogger("lightning_recipes")


def warn_if_short(trainer: lightning.Trainer, folder: Path, retention: Retention) -> None:
    """One line where the free disk is less than what will be kept, and one more while it is written. A collective."""
    one = checkpoint_bytes(trainer)
    if not trainer.is_global_zero:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # each save will say so as well
        LOGGER.warning(f"Nothing can be saved in {folder}: {error.strerror}")
        return
    kept = retention.keep_last + retention.keep_best + 1
    needed = max(one * kept - sum(m.total_bytes for m in manifests(folder).values()), one)
    free = shutil.disk_usage(folder).free
    if free < needed:
        LOGGER.warning(
            f"Checkpoints take {_gib(one)} GiB each and up to {kept} lie on the disk at a time, which has"
            f" {_gib(free)} GiB free: {'none' if free < one else 'not all'} of them will fit."
            " Make room, or checkpoint.keep_last=1, or hydra.run.dir=<a folder on a larger disk>"
        )


def checkpoint_bytes(trainer: lightning.Trainer) -> int:
    """Of the tensors of one checkpoint, over all ranks. A collective."""
    checkpoint: dict[str, Any] = {
        "state_dict": trainer.strategy.lightning_module_state_dict(),
        "optimizer_states": [
            trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers
        ],
    }
    task = trainer.lightning_module
    task.on_save_checkpoint(checkpoint)
    _, parts = take_apart(checkpoint, rank=trainer.global_rank)
    mine = torch.tensor(float(sum(_bytes(part) for part in parts.values())), dtype=torch.float64)
    return int(trainer.strategy.sum_over_ranks(mine))  # type: ignore[attr-defined]


def _bytes(part: Part) -> int:
    return part.tensor.numel() * part.tensor.element_size()


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g}"
