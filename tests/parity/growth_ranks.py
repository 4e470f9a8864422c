"""Train in float16 with a loss scale that doubles every second step: python growth_ranks.py <cases> <results>.

With `as_upstream`, DeepSpeed doubles its scale where it normally does within the step, without our correction.
"""

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

import run_cases  # noqa: E402
from support import composed_config, read_metrics, resolved  # noqa: E402

from recipes.build import build  # noqa: E402
from recipes.strategy.deepspeed import strategy as zero_loss_scale  # noqa: E402

zero_loss_scale.GROWTH_INTERVAL = 2
_grow_after_the_step = zero_loss_scale._grow_after_the_step


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train; return the metric rows."""
    zero_loss_scale._grow_after_the_step = (lambda optimizer: None) if case["as_upstream"] else _grow_after_the_step
    run = build(resolved(composed_config(*case["overrides"]) | {"data": case["data"]}, folder))
    scaler = getattr(run.trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        scaler.set_growth_interval(2)
    run.trainer.fit(run.task, datamodule=run.data)
    return {"rows": read_metrics(folder) if run.trainer.is_global_zero else []}


if __name__ == "__main__":
    run_cases.run_all(run_case)
