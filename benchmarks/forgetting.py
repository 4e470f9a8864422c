"""Measure how much `recipe=mixture` forgets its original data, by the fraction of it that is replayed."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import build_run, report

OLD_STEPS = 500
SHARES = (0.0, 0.05, 0.25)
SEEDS = (1234, 7)


def train(share: float, seed: int) -> dict[str, Any]:
    """Train on code, then on string tasks with a given fraction of code; return the result row."""
    print(f"{share:.0%} replayed, seed {seed}", file=sys.stderr)
    stage = f"{{from: {8 * OLD_STEPS}, weights: {{code: {share}, letters: {1 - share}}}}}"
    with tempfile.TemporaryDirectory() as folder:
        cache = [f"{place}.cache_dir={Path(folder) / 'cache'}" for place in _PLACES]
        more = [f"data.stages=[{stage}]", f"seed={seed}", f"eval_every={OLD_STEPS}", "save_every=null"]
        run = build_run(["recipe=mixture", "~callbacks.report", *cache, *more])
        before: dict[str, float] = {}

        def remember(trainer: Any, *_: Any) -> None:
            if trainer.global_step == OLD_STEPS:
                before["old"] = float(trainer.callback_metrics["val/old/loss"])

        run.task.on_validation_end = lambda: remember(run.trainer)  # type: ignore[method-assign]
        run.trainer.fit(run.task, datamodule=run.data)
        found = run.trainer.callback_metrics
    return {
        "replayed share": f"{share:.0%}",
        "seed": seed,
        "loss on code after the first stage": f"{before['old']:.3f}",
        "after the second": f"{float(found['val/old/loss']):.3f}",
        "exact match on 200 held-out prompts": f"{float(found['val/exact_match']):.3f}",
        "new samples": f"{int(8 * OLD_STEPS * (1 - share)):,}",
    }


_PLACES = ("data.sources.code", "data.sources.letters", "eval_data.old")


def main() -> None:
    report("forgetting", [train(share, seed) for share in SHARES for seed in SEEDS])


if __name__ == "__main__":
    main()
