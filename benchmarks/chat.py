"""Measure `make chat`: the time of each stage, and what the model can do after it.

The stages are those of conf/pipeline/chat_nano.yaml, each a run of its own. `exact match` is the share of held-out
questions whose whole greedy answer is right, as `mode=evaluate` finds it.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import report

ROOT = Path(__file__).parent.parent


def read_stage(name: str, folder: Path, seconds: float | None) -> dict[str, Any]:
    """Return the result row of a stage."""
    row: dict[str, Any] = {"stage": name, "minutes": None if seconds is None else f"{seconds / 60:.1f}"}
    summary = json.loads((folder / "summary.json").read_text()) if (folder / "summary.json").exists() else {}
    # of a stage that only evaluates: what it found on the whole split
    found = folder / "evaluate_val.json"
    values: dict[str, float] = json.loads(found.read_text()) if found.exists() else {}
    values = {name.removeprefix("val/"): value for name, value in values.items()}
    return row | {
        "steps": summary.get("steps"),
        "val loss": f"{values['loss']:.3f}" if "loss" in values else None,
        "exact match": f"{values['exact_match']:.3f}" if "exact_match" in values else None,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name) / "chat", time.monotonic()
        command = [sys.executable, "train.py", "pipeline=chat_nano", f"hydra.run.dir={folder}"]
        subprocess.run(command, cwd=ROOT, check=True)
        minutes = (time.monotonic() - began) / 60
        stages = json.loads((folder / "pipeline.json").read_text())["stages"]
        rows = [read_stage(each, folder / stage["folder"], stage.get("seconds")) for each, stage in stages.items()]
    rows.append(dict.fromkeys(rows[0]) | {"stage": "all", "minutes": f"{minutes:.1f}"})
    report("chat", rows, command="python benchmarks/chat.py")


if __name__ == "__main__":
    main()
