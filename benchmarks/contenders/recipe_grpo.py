"""`train.py recipe=grpo` with all default callbacks and loggers."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from turns import Turns

sys.path.insert(0, str(Path(__file__).parent.parent))

import recipes  # noqa: F401  # isort: skip  # before Lightning, as in measure.py

from lightning.pytorch.callbacks import Callback
from measure import build_run

import lightning_recipes as lr


class _Timer(Callback):
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._turns.tick()


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    run = build_run(spec["overrides"])
    turns = Turns(spec["turn"])
    run.trainer.callbacks.insert(0, _Timer(turns))  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    turns.report([float(row["reward/mean"]) for row in lr.read(run.folder).rows])


if __name__ == "__main__":  # the loader's processes import this module
    main()
