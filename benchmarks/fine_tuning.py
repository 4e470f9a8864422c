"""Exact match of `recipe=sft_demo` on held-out prompts, compared with controls and a run without packing."""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import recipes  # noqa: F401  # isort: skip  # before Lightning, as in measure.py

from lightning.pytorch.callbacks import Callback
from measure import build_run, report

EVERY = 100
EXAMPLES_PER_ROW = 9  # average number that fits into 128 tokens
UNPACKED = ["data.packing=false", f"global_batch_size={8 * EXAMPLES_PER_ROW}", f"eval_samples={64 * EXAMPLES_PER_ROW}"]
CASES: dict[str, list[str]] = {
    "untrained (one step)": ["trainer.max_steps=1", "warmup_steps=1"],
    "recipe (packed rows)": [],
    "one example per row": UNPACKED,
    "control: loss on prompts too": ["data.train_on=all"],
    "control: shuffled answers": ["data.shuffle_answers=true"],
}


class _Clock(Callback):
    """Records the seconds and non-padding tokens of each step, and the exact match at each validation."""

    def __init__(self) -> None:
        self.exact_match: list[float] = []
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.num_positions = 0
        self._began = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.tokens.append(int((batch["inputs"] != 0).sum()))
        self.num_positions += batch["inputs"].numel()
        self._began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.exact_match.append(float(trainer.callback_metrics["val/exact_match"]))


def train(case: str) -> dict[str, Any]:
    """Train, answer the held-out prompts, and return the result row for a case."""
    print(case, file=sys.stderr)
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["recipe=sft_demo", f"data.cache_dir={Path(folder) / 'cache'}", "save_every=null"]
        run = build_run([*fixed, "~callbacks.report", f"eval_every={EVERY}", *CASES[case]])
        run.trainer.callbacks.append(clock)  # type: ignore[attr-defined]
        began = time.perf_counter()
        run.trainer.fit(run.task, datamodule=run.data)
        seconds = time.perf_counter() - began
    per_second = sum(clock.tokens) / sum(clock.seconds)
    return {
        "case": case,
        f"exact match on 200 held-out prompts after {EVERY}, {2 * EVERY}, … steps": " ".join(
            f"{share:.3f}" for share in clock.exact_match
        ),
        "val/loss": f"{float(run.trainer.callback_metrics['val/loss']):.3f}",
        "padding": f"{1 - sum(clock.tokens) / clock.num_positions:.0%}",
        "tokens/s, padding excluded": f"{per_second:,.0f}",
        "step, ms": f"{1e3 * statistics.median(clock.seconds):.1f}",
        "total, s": f"{seconds:.0f}",
    }


def main() -> None:
    report("fine_tuning", [train(case) for case in CASES])


if __name__ == "__main__":
    main()
