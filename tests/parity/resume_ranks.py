"""Train and resume, case by case, as one rank: python resume_ranks.py <cases.json> <results.json>.

A case is a list of overrides and, optionally, a data node that replaces the composed one. Each case trains to step 3,
then again from its checkpoint at step 2; the result is the last row of both runs.
"""

import gc
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

from run_cases import run_all  # noqa: E402
from support import composed_config, read_metrics, resolved  # noqa: E402

from recipes.build import build  # noqa: E402


def train(case: dict[str, Any], folder: Path, *more: str) -> dict[str, float]:
    """Train; return the last metric row."""
    folder.mkdir(exist_ok=True)
    config = composed_config(*case["overrides"], *more)
    config |= {"data": case["data"]} if "data" in case else {}
    run = build(resolved(config, folder))
    run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    run.trainer.strategy.barrier()
    return read_metrics(folder)[-1] if run.trainer.is_global_zero else {}


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train without interruption, then resume from the middle checkpoint."""
    uninterrupted = train(case, folder / "uninterrupted")
    gc.collect()
    checkpoint = folder / "uninterrupted/checkpoints/step_0000002.ckpt"
    return {
        "uninterrupted": uninterrupted,
        "resumed": train(case, folder / "resumed", f"resume={checkpoint}"),
    }


if __name__ == "__main__":
    run_all(run_case)
