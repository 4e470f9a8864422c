"""Train while measuring speed and loss independently: python speed_ranks.py <cases.json> <results.json>.

The last rank sleeps in every forward pass. The result is the metric rows, the time at which rank 0 finished each step,
and the loss sum and target count of the first step's samples with the initial weights.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

import recipes  # noqa: E402, F401  # isort: skip  # before Lightning, as in conftest.py

import lightning.pytorch as lightning  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402
from run_cases import run_all  # noqa: E402
from support import composed_config, read_metrics, resolved  # noqa: E402

from callbacks.throughput.callback import SpeedMonitor  # noqa: E402
from recipes.build import build  # noqa: E402
from recipes.numerics.loss import cross_entropy_sum  # noqa: E402


class IndependentMeasurement(Callback):
    """Slows down the forward passes of one rank; measures step times and the first loss independently."""

    def __init__(self, wait_seconds: float) -> None:
        self.wait_seconds = wait_seconds
        self.ended: dict[int, float] = {}
        self.sums = torch.zeros(2, dtype=torch.float64)  # loss, targets

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 0:
            with torch.no_grad(), trainer.precision_plugin.forward_context():
                loss_sum = cross_entropy_sum(pl_module.outputs(batch), batch["targets"])
            num_targets = (batch["targets"] != -100).sum()
            self.sums += torch.stack([loss_sum.double(), num_targets.double()])
        if trainer.global_rank == trainer.world_size - 1:
            inner = type(pl_module).training_step

            def delayed(*arguments: Any) -> Any:
                time.sleep(self.wait_seconds)
                return inner(pl_module, *arguments)

            pl_module.training_step = delayed

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.ended.setdefault(trainer.global_step, time.perf_counter())


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    config = composed_config(*case["overrides"]) | {"data": case["data"]}
    run = build(resolved(config, folder))
    measured = IndependentMeasurement(case["wait_seconds"])
    callbacks: list[Any] = run.trainer.callbacks  # type: ignore[attr-defined]
    [index] = [n for n, callback in enumerate(callbacks) if isinstance(callback, SpeedMonitor)]
    callbacks.insert(index, measured)  # right before it, so that both clocks are read at the same time
    run.trainer.fit(run.task, datamodule=run.data, weights_only=True)
    dist.all_reduce(measured.sums)
    events = (folder / "events.jsonl").read_text() if (folder / "events.jsonl").exists() else ""
    rows = read_metrics(folder) if run.trainer.is_global_zero else []
    return {"rows": rows, "ended": measured.ended, "sums": measured.sums.tolist(), "events": events}


if __name__ == "__main__":
    run_all(run_case)
