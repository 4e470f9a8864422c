"""Train from the weights of another run, as one rank: python start_ranks.py <cases.json> <results.json>.

The result is the metric rows, the record of the source, and what the log says about each tensor.
"""

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

from run_cases import run_all  # noqa: E402
from support import composed_config, read_metrics, resolved  # noqa: E402

from recipes.build import build  # noqa: E402
from recipes.config.compose import freeze  # noqa: E402


def run_case(case: dict[str, Any], _: Path) -> dict[str, Any]:
    folder = Path(case["folder"])
    folder.mkdir(exist_ok=True)
    composed = resolved(composed_config(*case["overrides"]) | {"data": case["data"]}, folder)
    run = build(composed)
    run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    run.trainer.strategy.barrier()
    if run.trainer.is_global_zero and "adapter=lora" in case["overrides"]:
        freeze(composed)  # as mode=fit does: it says which adapter there is to merge
    run.trainer.strategy.barrier()
    source = run.task.first_weights
    return {
        "rows": read_metrics(folder) if run.trainer.is_global_zero else [],
        "started_from": list(run.task.started_from),
        "described": [] if source is None else list(source.describe()),
    }


if __name__ == "__main__":
    run_all(run_case)
