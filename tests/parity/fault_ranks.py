"""One rank that meets faults, case by case: python fault_ranks.py <cases.json> <results.json>.

A case is the words of a command line, a data node and a fault; the result is the rows and the events of the run.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

from faults import FaultAt  # noqa: E402
from run_cases import carry_out  # noqa: E402
from support import composed_config, read_metrics  # noqa: E402

from recipes.build import build  # noqa: E402


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train; what the run left."""
    config = composed_config(*case["words"])
    config |= {"data": case["data"]} if "data" in case else {}
    run = build(config, folder, [])
    if case.get("fault") is not None:
        run.trainer.callbacks.insert(0, FaultAt(**case["fault"]))  # type: ignore[attr-defined]
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
    told = [json.loads(line) for line in lines]
    return {"rows": read_metrics(folder), "events": told, "stopped": error}


if __name__ == "__main__":
    carry_out(run_case)
