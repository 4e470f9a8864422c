"""Measure `make chat`, or a vision-language model: the time of each stage, and what the model can do after it.

The stages are those of conf/pipeline/chat_nano.yaml, each a run of its own; of vlm_nano.yaml, if `vlm_nano` is typed.
`exact match` is the share of the held-out questions, the same ones after each stage, whose whole greedy answer is
right, as `mode=evaluate` finds it; `± s.d.` is the standard deviation of that share.

`python benchmarks/chat.py killed` kills the pipeline with all its processes at a random step of two stages, starts it
again, and compares its stages with those of one that was not killed: that of a folder that is typed, or another one.
"""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from measure import report
from safetensors import safe_open

from recipes.config.compose import CONF
from recipes.pipeline.command_line import read_command

ROOT = Path(__file__).parent.parent
SEED = 11  # of the steps at which it is killed
NUM_KILLS = 2


def start(folder: Path, pipeline: str = "chat_nano") -> subprocess.Popen[bytes]:
    """Start a pipeline in a folder, as the leader of a process group."""
    command = [sys.executable, "train.py", f"pipeline={pipeline}", f"hydra.run.dir={folder}"]
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True)


def finish(folder: Path, pipeline: str = "chat_nano") -> None:
    """Run a pipeline to its end."""
    process = start(folder, pipeline)
    if process.wait() != 0:
        raise subprocess.CalledProcessError(process.returncode, process.args)


def read_stages(folder: Path) -> Mapping[str, Any]:
    """Return the entries of `pipeline.json` by stage; empty before the first stage starts."""
    file = folder / "pipeline.json"
    stages: Mapping[str, Any] = json.loads(file.read_text())["stages"] if file.exists() else {}
    return stages


def read_values(run: Path) -> dict[str, float]:
    """Return what a stage that only evaluates has found; empty for any other."""
    file = run / "evaluate_val.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return {name: value for name, value in found.items() if isinstance(value, float)}


def read_stage(name: str, run: Path, seconds: float | None) -> dict[str, Any]:
    """Return the result row of a stage."""
    row: dict[str, Any] = {"stage": name, "minutes": None if seconds is None else f"{seconds / 60:.1f}"}
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    values = read_values(run)
    row |= {"steps": summary.get("steps"), "val loss": f"{values['loss']:.3f}" if "loss" in values else None}
    if "exact_match" not in values:
        return row | {"exact match": None, "± s.d.": None, "questions": None}
    [count] = re.findall(r"of ([\d,]+) answers are correct", (run / "job.log").read_text())[-1:]
    share, num_asked = values["exact_match"], int(count.replace(",", ""))
    deviation = (share * (1 - share) / num_asked) ** 0.5
    return row | {"exact match": f"{share:.3f}", "± s.d.": f"{deviation:.3f}", "questions": num_asked}


def measure_time(folder: Path, pipeline: str) -> list[dict[str, Any]]:
    """Return the result rows of all stages of a pipeline, and of all together."""
    began = time.monotonic()
    finish(folder, pipeline)
    minutes = (time.monotonic() - began) / 60
    stages = read_stages(folder)
    rows = [read_stage(name, folder / stage["folder"], stage.get("seconds")) for name, stage in stages.items()]
    return [*rows, dict.fromkeys(rows[0]) | {"stage": "total", "minutes": f"{minutes:.1f}"}]


def read_last_step(run: Path) -> int:
    """Return the last step in `metrics.csv` of a run; 0 if there is none."""
    file = run / "metrics.csv"
    lines = file.read_text().splitlines() if file.exists() else []
    if len(lines) < 2 or "step" not in lines[0].split(","):
        return 0
    found = lines[-1].split(",")[lines[0].split(",").index("step")]
    return int(float(found)) if found else 0


def kill_at(folder: Path, stage: str, share: float) -> int:
    """Start the pipeline, and kill its process group after a share of the steps of a stage; return the step."""
    process = start(folder)
    while process.poll() is None:
        entry = read_stages(folder).get(stage)
        run = None if entry is None or entry["state"] != "running" else folder / entry["folder"]
        if run is not None and (step := read_last_step(run)):
            max_steps = yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"]
            if step >= share * max_steps:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return step
        time.sleep(0.05)
    raise RuntimeError(f"the pipeline ended with {process.returncode} before {share:.0%} of {stage}")


def hash_weights(run: Path) -> str | None:
    """Return a hash of the tensors of the last checkpoint, with its optimizer state, or of an export; else None."""
    shards = sorted([*run.glob("checkpoints/last/*.safetensors"), *run.glob("export/*.safetensors")])
    digest = hashlib.sha256()
    for shard in shards:
        with safe_open(shard, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                digest.update(name.encode())
                digest.update(tensors.get_tensor(name).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if shards else None


def measure_kills(folder: Path, undisturbed: Path) -> list[dict[str, Any]]:
    """Return a row for each stage: where it was killed, and whether it ended as in the pipeline that was not."""
    rng = random.Random(SEED)
    stages = read_command(["pipeline=chat_nano"], config_folder=CONF).stages
    trained = [stage.name for stage in stages if stage.trains]
    chosen = sorted(rng.sample(trained, NUM_KILLS), key=trained.index)
    killed = {name: kill_at(folder, name, rng.random()) for name in chosen}
    finish(folder)
    return compare(folder, undisturbed, killed)


def compare(folder: Path, undisturbed: Path, killed: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the rows of two pipelines, of which one was killed after these steps of its stages."""
    rows, expected = [], read_stages(undisturbed)
    for name, stage in read_stages(folder).items():
        run, other = folder / stage["folder"], undisturbed / expected[name]["folder"]
        row, values, weights = read_stage(name, run, None), read_values(run), hash_weights(run)
        if not values and weights is None:
            continue  # it only prints
        is_same = values == read_values(other) and weights == hash_weights(other)
        rows.append(
            {
                "stage": name,
                "killed after step": killed.get(name),
                "val loss": row["val loss"],
                "exact match": row["exact match"],
                "weights": None if weights is None else weights[:12],
                "same as without kills": "yes" if is_same else "NO",
            }
        )
    return rows


def main() -> None:
    kills, typed = sys.argv[1:2] == ["killed"], [Path(text).absolute() for text in sys.argv[2:]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if sys.argv[1:2] == ["vlm_nano"]:
            report("vlm_nano", measure_time(folder / "vlm", "vlm_nano"), command="python benchmarks/chat.py vlm_nano")
            return
        if not kills:
            report("chat", measure_time(folder / "chat", "chat_nano"), command="python benchmarks/chat.py")
            return
        if not typed:
            finish(folder / "undisturbed")
        undisturbed = typed[0] if typed else folder / "undisturbed"
        report("chat_killed", measure_kills(folder / "killed", undisturbed), command="python benchmarks/chat.py killed")


if __name__ == "__main__":
    main()
