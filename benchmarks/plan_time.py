"""Planned against measured: seconds per optimizer step on this CPU, with `plan.hardware=measured`.

Each run trains a few steps and is then planned in the same process, because the machine's speed may drift.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import report  # isort: skip: it imports Lightning behind recipes

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Callback

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from plan_cases import COMMON, DEEP, GPT, LLAMA, RECOMPUTE, RESNET, WIDE, cpu_cluster
from support import composed_config, resolved

from recipes.build import build
from recipes.plan.measured import OperatorTimer
from recipes.plan.plan import make_plan

NUM_STEPS, WARMUP = 13, 3
LARGER = [*GPT, "seq_len=256", "model.max_seq_len=256", "model.vocab_size=8192"]
CASES: dict[str, list[str]] = {
    "gpt2": GPT,
    "gpt2, batch 2": [*GPT, "global_batch_size=2"],
    "gpt2, batch 32": [*GPT, "global_batch_size=32"],
    "gpt2, 4 micro-batches": [*GPT, "micro_batch_size=2"],
    "gpt2, recomputed": [*GPT, RECOMPUTE],
    "gpt2, bf16-mixed": [*GPT, "precision=bf16-mixed"],
    "gpt2, bf16-true": [*GPT, "precision=bf16-true"],
    "gpt2, dropout": [*GPT, "model.dropout=0.1"],
    "gpt2, average of the weights": [*GPT, "ema_decay=0.99"],
    "gpt2, SGD": [*GPT, "optimizer=sgd"],
    "gpt2, label smoothing and z-loss": [*GPT, "label_smoothing=0.1", "z_loss=1e-4"],
    "gpt2, 256 tokens, vocabulary 8192": LARGER,
    "gpt2, 256 tokens, vocabulary 8192, recomputed": [*LARGER, RECOMPUTE],
    "gpt2, 12 layers": DEEP,
    "gpt2, wide": WIDE,
    "gpt2, wide, 2 micro-batches": [*WIDE, "micro_batch_size=4"],
    "llama": LLAMA,
    "llama, batch 32": [*LLAMA, "global_batch_size=32"],
    "llama, recomputed, 2 micro-batches": [*LLAMA, RECOMPUTE, "micro_batch_size=4"],
    "resnet18": [*RESNET, "global_batch_size=64"],
}


class Steps(Callback):
    """Records the seconds from the start of a step's first micro-batch to the end of its last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start: float | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = self._start or time.perf_counter()

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self._start is not None and trainer.global_step > len(self.seconds):
            self.seconds.append(time.perf_counter() - self._start)
            self._start = None


def main() -> None:
    timer = OperatorTimer(torch.device("cpu"))
    rows: list[dict[str, Any]] = []
    for name, overrides in CASES.items():
        config = composed_config(
            *COMMON, *overrides, f"trainer.max_steps={NUM_STEPS}", f"eval_every={NUM_STEPS}", "trainer.devices=1"
        )
        run, steps = build(resolved(config, Path(tempfile.mkdtemp(prefix="plan_time_")))), Steps()
        run.trainer.callbacks.append(steps)  # type: ignore[attr-defined]
        run.trainer.fit(run.task, datamodule=run.data)
        measured = statistics.median(steps.seconds[WARMUP:])
        times = make_plan(resolved(config), cpu_cluster(1), rates=timer).times
        assert times is not None
        rows.append(
            {
                "run": name,
                "planned_milliseconds": round(1000 * times.step_seconds, 1),
                "measured_milliseconds": round(1000 * measured, 1),
                "error_percent": round(100 * (times.step_seconds / measured - 1), 1),
            }
        )
    errors = [abs(row["error_percent"]) for row in rows]
    print(f"median error {statistics.median(errors):.1f} %, worst {max(errors):.1f} %, of {len(rows)} runs")
    report("plan_time", rows)


if __name__ == "__main__":
    main()
