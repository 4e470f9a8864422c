"""One rank that trains and goes on, case by case: python resume_ranks.py <cases.json> <results.json>.

A case is the words of a command line and, where it is there, a data node that takes the place of the composed one.
Each is trained to step 3, then again from its checkpoint of step 2; the result is both runs' last row.
"""

import gc
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

from run_cases import carry_out  # noqa: E402
from support import composed_config, read_metrics  # noqa: E402

from recipes.build import build  # noqa: E402


def train(case: dict[str, Any], folder: Path, *more: str) -> dict[str, float]:
    """The last row of a run."""
    folder.mkdir(exist_ok=True)
    config = composed_config(*case["words"], *more)
    config |= {"data": case["data"]} if "data" in case else {}
    run = build(config, folder, [])
    run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    run.trainer.strategy.barrier()
    return read_metrics(folder)[-1] if run.trainer.is_global_zero else {}


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train without a pause, then from the checkpoint in the middle."""
    whole = train(case, folder / "whole")
    gc.collect()
    checkpoint = folder / "whole/checkpoints/step_0000002.ckpt"
    return {"whole": whole, "resumed": train(case, folder / "again", f"resume={checkpoint}")}


if __name__ == "__main__":
    carry_out(run_case)
