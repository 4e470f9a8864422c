"""Measure what each reference of preference tuning costs: CPU seconds of a step and before the first, and memory.

A model of 25 million parameters, 4 pairs of up to 64 tokens a step, on one thread; each case in a process of its own,
whose peak memory is that of the case.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import recipes  # noqa: F401  # isort: skip  # before Lightning, as in measure.py

from lightning.pytorch.callbacks import Callback
from measure import build_run, report

NUM_PAIRS, NUM_STEPS, SKIPPED = 320, 12, 2
CASES = {
    "precomputed": ("task.reference=precomputed",),
    "frozen_copy": ("task.reference=frozen_copy",),
    "precomputed, LoRA": ("task.reference=precomputed", "adapter=lora"),
    "adapter_off, LoRA": ("task.reference=adapter_off", "adapter=lora"),
}
RUN = (
    *("recipe=dpo", "tokenizer=bytes", "model=gpt2_nano", "model.vocab_size=257", "model.max_seq_len=64"),
    *("model.num_layers=8", "model.num_heads=8", "model.hidden_size=512", "model.dropout=0", "global_batch_size=4"),
    *("micro_batch_size=4", "trainer.accelerator=cpu", "callbacks=[]", "save_every=null", "eval_every=1000"),
    *("data.val_fraction=0.05", f"trainer.max_steps={NUM_STEPS}"),
)


class Timer(Callback):
    """Measures the CPU seconds of this process in each step and before the first."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.before = 0.0
        self._began = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._began = time.process_time()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        now = time.process_time()
        self.before = self.before if self.steps or batch_idx else now - self._began
        self._began = now

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(time.process_time() - self._began)


def measure(case: str) -> dict[str, Any]:
    """Train in this process and return the row of a case."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = Path(folder) / "pairs.jsonl"
        rows = [
            {"prompt": f"{row}: " + "ab" * 8, "chosen": "cd" * (14 + row % 6), "rejected": "dc" * (14 + row % 5)}
            for row in range(NUM_PAIRS)
        ]
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        places = (f"data.path={pairs}", f"data.cache_dir={folder}", f"task.cache_dir={folder}")
        run, timer = build_run([*RUN, *places, *CASES[case]]), Timer()
        run.trainer.callbacks.insert(0, timer)  # type: ignore[attr-defined]
        run.trainer.fit(run.task, datamodule=run.data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "reference": case,
        "step, CPU s": f"{statistics.median(timer.steps[SKIPPED:]):.2f}",
        f"before the first step, CPU s for {NUM_PAIRS} pairs": f"{timer.before:.1f}",
        "peak memory of the process, MiB": f"{peak:,.0f}",
    }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    rows = []
    for case in CASES:
        print(case, file=sys.stderr, flush=True)
        command = [sys.executable, __file__, case]
        shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows.append(json.loads(shown.splitlines()[-1]))
    report("preference_references", rows)


if __name__ == "__main__":
    main()
