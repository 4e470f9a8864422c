"""Train with injected faults, case by case, as one rank: python fault_ranks.py <cases.json> <results.json>.

A case is a list of overrides, a data node and a list of faults; the result is the run's rows and events.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

import recipes  # noqa: E402, F401  # isort: skip  # before Lightning, as in conftest.py

from faults import FaultAt  # noqa: E402
from run_cases import run_all  # noqa: E402
from support import composed_config, read_metrics, resolved  # noqa: E402

from recipes.build import build  # noqa: E402


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train; return the metric rows and events of the run."""
    config = composed_config(*case["overrides"])
    config |= {"data": case["data"]} if "data" in case else {}
    run = build(resolved(config, folder))
    run.trainer.callbacks[:0] = [FaultAt(**fault) for fault in case["faults"]]  # type: ignore[attr-defined]
    error = None
    try:
        run.trainer.fit(run.task, datamodule=run.data)
    except RuntimeError as raised:
        if not hasattr(raised, "exit_code"):
            raise
        error = str(raised)
    run.trainer.strategy.barrier()
    if not run.trainer.is_global_zero:
        return {}
    events = folder / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    parsed = [json.loads(line) for line in lines]
    return {"rows": read_metrics(folder), "events": parsed, "stopped": error}


if __name__ == "__main__":
    run_all(run_case)
