"""Inject an outlier into a run with snapshots, case by case, as one rank: rollback_ranks.py <cases> <results>.

The result is the events, the final loss, and the restored tensors that differ from their original state.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tests", "tests/parity", "benchmarks")]

from faults import FaultAt  # noqa: E402
from run_cases import run_all  # noqa: E402
from support import composed_config, read_metrics, resolved  # noqa: E402

from gpu_checks.callbacks import StateDigests  # noqa: E402
from recipes.build import build  # noqa: E402
from recipes.run_folder import EVENTS_FILE, read_json_lines  # noqa: E402


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train through the injected outlier."""
    run = build(resolved(composed_config(*case["overrides"]) | {"data": case["data"]}, folder))
    digests = StateDigests()
    run.trainer.callbacks[:0] = [FaultAt(kind="inputs", step=case["fault_after"]), digests]  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    events = read_json_lines(folder / EVENTS_FILE)
    return {
        "steps": run.trainer.global_step,
        "final_loss": read_metrics(folder)[-1]["train/loss"],
        "skips": [event["step"] for event in events if event["event"] == "skip"],
        "rollbacks": [[event["from"], event["step"]] for event in events if event["event"] == "rollback"],
        "restored": digests.rollbacks,
        "num_states": len({tuple(state.values()) for state in digests.after_step.values()}),
    }


if __name__ == "__main__":
    run_all(run_case)
